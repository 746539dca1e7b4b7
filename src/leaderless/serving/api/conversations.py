"""Questions in the format of OpenAI's API, answered by the conversations of a run."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.programs.chat import Chat, ChatAnswer, differs
from leaderless.environments.programs.messages import AskRefusedError
from leaderless.rollout.engine import Delta, SamplingParams
from leaderless.serving.api.errors import ApiError
from leaderless.serving.api.json_bodies import event, fail, read_body, refuse, refuse_http, serialized
from leaderless.serving.api.requests import ApiRequest, CompletionQuestion, read_question
from leaderless.serving.api.responses import ChoicePart, CompletionComposer
from leaderless.serving.api.tool_calls import ToolComposer, ToolQuestion

Ask = Callable[[Chat], Awaitable[ChatAnswer]]
HANDLERS = {ApiError: refuse, HTTPException: refuse_http, Exception: fail}
"""Handlers that answer errors."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class RequestOwner(Protocol):
    """Who answers a request."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the policy."""

    @property
    def params(self) -> SamplingParams:
        """Distribution from which it samples."""

    def chats(self, num: int) -> Sequence[Chat]:
        """The conversation in which each response is asked for."""

    def replied(self, identity: str, chats: Sequence[Chat]) -> None:
        """Note that all responses are there, and the name that the client knows them by."""


class Asking(ABC):
    """Endpoints that ask whoever an address stands for."""

    @abstractmethod
    def find(self, request: Request) -> RequestOwner:
        """Who answers a request.

        Raises:
            ApiError: Nobody does.
        """

    async def models(self, request: Request) -> Response:
        """List the only model."""
        self.find(request)
        model: Json = {"id": "policy", "object": "model", "created": 0, "owned_by": "leaderless"}
        return JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        """Continue a chat."""
        asked = self.find(request)
        question = read_question(await read_body(request), ToolQuestion)
        tools = question.tools if question.tool_choice == "auto" else ()
        messages = [message.to_json() for message in question.messages]

        def ask(chat: Chat) -> Awaitable[ChatAnswer]:
            return chat.ask(messages, tools=tools, max_tokens=question.longest, stop=question.stop_texts)

        return await _reply(request, asked, ToolComposer(question, [[]], asked.tokenizer), [ask] * question.n)

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        asked = self.find(request)
        question = read_question(await read_body(request), CompletionQuestion)

        def asking(prompt: str | Sequence[int]) -> Ask:
            return lambda chat: chat.complete(prompt, max_tokens=question.max_tokens, stop=question.stop_texts)

        asks = [asking(prompt) for prompt in question.prompts for _ in range(question.n)]
        composer = CompletionComposer(question, [[] for _ in question.prompts], asked.tokenizer)
        return await _reply(request, asked, composer, asks)


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the worker."""

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _reply(
    request: Request, asked: RequestOwner, composer: ToolComposer | CompletionComposer, asks: Sequence[Ask]
) -> Response:
    """Ask, and compose the reply; a stream has everything at once."""
    question = composer.question
    _check_sampling(question, asked.params)
    chats = asked.chats(len(asks))
    answers = await _unless_gone(request, [partial(ask, chat) for ask, chat in zip(asks, chats, strict=True)])
    if answers is None:
        return Response(status_code=499)  # never read
    asked.replied(composer.id, chats)
    composer.prompts = [list(answer.prompt_tokens) for answer in answers[:: question.n]]
    parts = [_part(composer, index, answer) for index, answer in enumerate(answers)]
    if not question.stream:
        return Response(serialized(composer.whole(parts)), media_type="application/json")

    async def events() -> AsyncIterator[bytes]:
        for reply in (*composer.first_chunks(), *map(composer.chunk, parts), *composer.last_chunks()):
            yield event(reply)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _check_sampling(question: ApiRequest, params: SamplingParams) -> None:
    given = question.model_fields_set
    named = {name: 0.0 for name in _SAMPLING if name in given}
    if problem := differs(question.distribution, named, params):
        raise ApiError(400, problem, problem.partition("=")[0])
    if question.seed is not None and question.seed != params.seed:
        raise ApiError(400, f"seed={question.seed} differs from the recipe's {params.seed}: leave it out", "seed")


async def _unless_gone(
    request: Request, asks: Sequence[Callable[[], Awaitable[ChatAnswer]]]
) -> list[ChatAnswer] | None:
    """All answers; None if the client has gone, and nothing is sampled for it any more."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    asking = asyncio.create_task(_all_of(asks))
    watching = asyncio.create_task(watch())
    try:
        await asyncio.wait((asking, watching), return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    except AskRefusedError as error:
        raise ApiError(503 if error.code == "aborted" else 400, str(error), code=error.code) from error
    except asyncio.CancelledError as error:
        if asking.cancelled():
            raise ApiError(503, "the episode has ended") from error
        raise
    finally:
        asking.cancel()
        watching.cancel()


async def _all_of(asks: Sequence[Callable[[], Awaitable[ChatAnswer]]]) -> list[ChatAnswer]:
    """The answers to questions that are asked at once; if one of them is refused, the others are canceled."""
    tasks = [asyncio.ensure_future(ask()) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _part(composer: ToolComposer | CompletionComposer, index: int, answer: ChatAnswer) -> ChoicePart:
    """An answer as a choice of a reply."""
    prompt, sibling = divmod(index, composer.question.n)
    reason: Literal["length", "stop"] = "length" if answer.finish_reason == "length" else "stop"
    part = composer.take(Delta(prompt, sibling, answer.tokens, answer.log_probs, reason))
    part.text, part.finish_reason = answer.content, answer.finish_reason
    if isinstance(composer, ToolComposer):
        composer.calls[index] = answer.tool_calls
    return part
