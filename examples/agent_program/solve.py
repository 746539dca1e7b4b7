"""Any program as an episode: it asks the policy whenever it likes, and returns what that was worth."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from leaderless import Chat
from leaderless.base.values import Json


async def vote(task: Mapping[str, Json], chat: Chat, num_votes: int = 3) -> Mapping[str, Json]:
    """Ask for several answers at once, and reward the one that most agree on.

    Args:
        task: Row of the dataset.
        chat: The policy.
        num_votes: Number of answers.
    """
    question = str(task["question"])
    answers = await asyncio.gather(*(chat.ask(question) for _ in range(num_votes)))
    votes = Counter(answer.content.strip() for answer in answers)
    chosen, count = votes.most_common(1)[0]
    return {"reward": float(chosen == str(task["answer"])), "votes": count}
