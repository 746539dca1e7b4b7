"""Programs ask the policy with OpenAI's client for responses; what was sampled stays as it was sampled."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.unit.environments.led import lead, text_of
from tests.unit.environments.test_door import client_of, look_up
from tests.unit.environments.test_programs import TOOL, trained_tokens

from leaderless.environments.programs import Chat
from leaderless.environments.protocol import Task

RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


@pytest.mark.parametrize("form", ["items", "stream", "name"])
def test_an_agent_with_responses_is_one_sample_of_what_was_sampled(form: str) -> None:
    async def agent(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            items: list[Any] = [{"role": "user", "content": "?"}]
            new, name = list(items), None
            for _ in range(5):
                asked: Any = {"model": "m", "instructions": "Be brief.", "tools": [RESPONSES_TOOL], "temperature": 1.0}
                if form == "name":
                    asked |= {"input": new, "previous_response_id": name}
                else:
                    asked |= {"input": items, "store": False}
                if form == "stream":
                    async with client.responses.stream(**asked) as stream:
                        answer: Any = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                name = answer.id
                items += answer.output
                calls = [item for item in answer.output if item.type == "function_call"]
                if not calls:
                    return float(answer.output_text == "blue")
                assert [json.loads(call.arguments) for call in calls] == [{"word": "ab"}]
                new = [{"type": "function_call_output", "call_id": call.call_id, "output": "seventh"} for call in calls]
                items += new
        return -1.0

    (episode,), engine = lead(agent, look_up, max_tokens=3000)
    assert not episode.error
    (sample,) = episode.trace.samples()
    assert trained_tokens(episode) == engine.said
    assert episode.trace.said()[-1].said.reward == 1.0
    assert text_of(sample.tokens).count("<|im_start|>tool\nseventh<|im_end|>\n") == 2


def test_responses_of_other_episodes_are_not_continued() -> None:
    names: list[str] = []

    async def solve(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            if task["text"] == "late":
                while not names:
                    await chat.ask("?")
                with pytest.raises(openai.BadRequestError, match="is not kept"):
                    await client.responses.create(model="m", input="a", previous_response_id=names[0])
            else:
                names.append((await client.responses.create(model="m", input="a")).id)
        return 1.0

    episodes, _ = lead(solve, tasks=[{"text": "early"}, {"text": "late"}], max_turns=10_000)
    assert [episode.error for episode in episodes] == ["", ""]


def test_what_would_change_the_numbers_is_refused() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        await chat.ask("first")
        async with client_of(chat) as client:
            with pytest.raises(openai.BadRequestError, match=r"temperature=0\.5 differs from the recipe's 1"):
                await client.responses.create(model="m", input="a", temperature=0.5)
        return 1.0

    (episode,), _ = lead(solve)
    assert not episode.error
