"""The environment of Search-R1: the policy searches, reads what was found, and answers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.environments.protocol import Environment, EpisodeFailed, Task, Turn
from leaderless.environments.search.retriever import Hit, RemoteRetriever, Retriever, open_pages

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QUESTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
"""The original's prompt."""
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Message of the original to a policy that has neither searched nor answered."""
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
"""The first of these in a message is the action."""
CHARACTERS_PER_TOKEN = 4
"""Characters that count as a token if there is no tokenizer to count them."""


class SearchR1(Environment):
    """Questions that are answered after searching, as in Search-R1.

    A message may hold `<search> query </search>`, which is answered by `<information>...</information>` with the pages
    found, or `<answer> ... </answer>`, which ends the episode. After anything else the policy reads what is valid.
    After `search_turns` messages one more follows, in which it can only answer. The answer is graded by rewards of the
    recipe, such as `answer_match`; the environment itself rewards nothing.

    The recipe should set `rollout.stop: [</search>, </answer>]`, so that the policy does not make up what was found.
    Its `environment.max_turns` must be at least `search_turns + 1`.

    Source: arXiv 2503.09516, `search_r1/llm_agent/generation.py`. Deviations: what was sampled is not encoded again;
    what was found is cut within the pages, so that its closing tag remains; a query of blanks is invalid.
    """

    def __init__(  # noqa: PLR0913 - options of a recipe
        self,
        *,
        pages: str | None = None,
        address: str | None = None,
        question: str = "question",
        prompt: str = QUESTION,
        search_turns: int = 4,
        topk: int = 3,
        max_information_tokens: int = 500,
        tokenizer: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Choose a retriever and limits.

        Args:
            pages: File of pages to search in this process; either this or `address`.
            address: Address of a server to ask, such as `http://127.0.0.1:8000/retrieve`.
            question: Column of the dataset that holds the question.
            prompt: First message to the policy; `{question}` stands for the question.
            search_turns: Messages in which the policy may search, 0 or more.
            topk: Most pages that a search finds, at least 1.
            max_information_tokens: Tokens at which what a search has found is cut, without its tags.
            tokenizer: Folder with the `tokenizer.json` that counts them; without one, four characters are a token.
            timeout_s: Seconds that the server may take; less than `environment.act_timeout_s`.

        Raises:
            RecipeError: An option is wrong, or the pages cannot be read.
        """
        if (pages is None) == (address is None):
            raise RecipeError.at("environment.options", "needs either pages, a file, or address, that of a server")
        for name, value, least in (
            ("search_turns", search_turns, 0),
            ("topk", topk, 1),
            ("max_information_tokens", max_information_tokens, 1),
        ):
            if value < least:
                raise RecipeError.at(f"environment.options.{name}", f"is {value}, but must be at least {least}")
        if "{question}" not in prompt:
            raise RecipeError.at("environment.options.prompt", "must have the place {question}")
        self._retriever: Retriever = (
            RemoteRetriever(address, timeout_s) if address is not None else open_pages(str(pages))
        )
        self._question, self._prompt = question, prompt
        self._turns_left, self._topk = search_turns, topk
        self._max_tokens, self._tokenizer = max_information_tokens, tokenizer

    @override
    def reset(self, task: Task, rng: Random) -> str:
        """Tell the policy the question."""
        question = task.get(self._question)
        if not isinstance(question, str):
            raise EpisodeFailed(f"the row has no text in its column '{self._question}'")
        return self._prompt.replace("{question}", question)

    @override
    def act(self, text: str) -> Turn:
        """Search, or end the episode with an answer."""
        kind, content = action_in(text)
        if kind == "answer":
            return Turn(done=True, info={"answer": content})
        if self._turns_left == 0:
            return Turn(done=True)
        self._turns_left -= 1
        if kind == "invalid":
            return Turn(INVALID)
        found = self._retriever.search(content, self._topk)
        shown = self._cut(show_pages(found))
        return Turn(f"\n\n<information>{shown}</information>\n\n", info={"query": content})

    def _cut(self, text: str) -> str:
        """Pages that were found, up to the most tokens that the policy reads."""
        if self._tokenizer is None:
            return text[: self._max_tokens * CHARACTERS_PER_TOKEN]
        encoded = _open_tokenizer(self._tokenizer).encode(text, add_special_tokens=False)
        return text if len(encoded) <= self._max_tokens else text[: encoded.offsets[self._max_tokens - 1][1]]


def action_in(text: str) -> tuple[str, str]:
    """Kind of a message, `search`, `answer` or `invalid`, and the query or the answer, without blanks around it."""
    found = ACTION.search(text)
    content = found[2].strip() if found else ""
    if found is None or (found[1] == "search" and not content):
        return "invalid", ""
    return found[1], content


def show_pages(hits: Sequence[Hit]) -> str:
    """Pages as the policy reads them."""
    lines = [f"Doc {number}(Title: {hit.page.title}) {hit.page.text}\n" for number, hit in enumerate(hits, start=1)]
    return "".join(lines).strip()


@lru_cache(maxsize=4)
def _open_tokenizer(folder: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise RecipeError.at("environment.options.tokenizer", f"there is no {path}: name the folder of a model")
    return Tokenizer.from_file(str(path))
