"""A server of a model that a test scripts, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from queue import Queue

import anthropic
import openai
from tests.templates import CHATML, tokenizer_with
from tests.unit.serving.api.engines import ScriptedServing, TalkingEngine

from leaderless.run.standalone_model import Served
from leaderless.serving.api.app import ModelServer
from leaderless.serving.listen import take_port

DEADLINE_S = 30.0
TOKENIZER = tokenizer_with(CHATML)
END = "<|im_end|>"
WORD_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "default": None},
    },
}


@dataclass
class TalkingSite:
    """A server whose model says what a test wants.

    Attributes:
        url: Address of the API, with its version.
        engine: The model.
        lines: Lines that the server has logged.
    """

    url: str
    engine: TalkingEngine
    lines: list[str]

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=DEADLINE_S)

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        url = self.url.removesuffix("/v1")
        return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S)


@contextmanager
def talking(say: Callable[[str], str], **options: int) -> Iterator[TalkingSite]:
    """A server whose model says what a function makes of the text of the prompt."""

    def tokens(prompt: list[int]) -> list[int]:
        return TOKENIZER.encode(say(TOKENIZER.decode(prompt)), add_special_tokens=False)

    assert TOKENIZER.eos_token_id is not None
    engine = TalkingEngine(tokens, TOKENIZER.eos_token_id)
    engine.decode = TOKENIZER.decode
    served = Served("m", TOKENIZER, len(TOKENIZER), 4000, ScriptedServing(engine))  # type: ignore[arg-type]
    started: Queue[None] = Queue()
    lines: list[str] = []
    server, listener = ModelServer(served, None, lines.append, **options), take_port("127.0.0.1", 0, None)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: asyncio.run(server.answer(listener, lambda: started.put(None))))
        started.get(timeout=DEADLINE_S)
        try:
            yield TalkingSite(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", engine, lines)
        finally:
            engine.may_step.set()
            server.should_exit = True
            ended.result(DEADLINE_S)
