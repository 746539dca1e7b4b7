"""A server within a run: programs that lead episodes ask the policy in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import uvicorn
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from leaderless.config import Json
from leaderless.environments.programs.chat import Answer, Chat, differs
from leaderless.environments.programs.messages import AskRefusedError
from leaderless.rollout.engine import Delta
from leaderless.serve.errors import ApiError
from leaderless.serve.port import take_port
from leaderless.serve.questions import CompletionQuestion, Question, read_question
from leaderless.serve.replies import ChoicePart, CompletionComposer
from leaderless.serve.tool_chats import ToolComposer, ToolQuestion
from leaderless.serve.wire import event, fail, read_body, refuse, refuse_http, serialized

HOST = "127.0.0.1"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Door:
    """See `Doorway`. It runs in the event loop of the episodes, on a free port that only this machine reaches."""

    def __init__(self) -> None:
        """Listen; nothing is answered before an episode is admitted."""
        self._chats: dict[str, tuple[Chat, str]] = {}
        self._listener = take_port(HOST, 0, None)
        self._listener.listen()
        app = Starlette(
            routes=[
                Route("/episodes/{episode}/v1/models", self._models),
                Route("/episodes/{episode}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/episodes/{episode}/v1/completions", self._completions, methods=["POST"]),
                Route("/episodes/{episode}/v1/reward", self._reward, methods=["POST"]),
            ],
            exception_handlers={ApiError: refuse, HTTPException: refuse_http, Exception: fail},
        )
        config = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none")
        self._server = _Server(config)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))

    def admit(self, chat: Chat) -> tuple[str, str]:
        """See `Doorway`."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(16)
        self._chats[name] = (chat, key)
        return f"http://{HOST}:{self._listener.getsockname()[1]}/episodes/{name}/v1", key

    def dismiss(self, chat: Chat) -> None:
        """See `Doorway`."""
        self._chats = {name: entry for name, entry in self._chats.items() if entry[0] is not chat}

    async def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        self._listener.close()

    async def _models(self, request: Request) -> Response:
        self._find(request)
        model: Json = {"id": "policy", "object": "model", "created": 0, "owned_by": "leaderless"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        chat = self._find(request)
        question = read_question(await read_body(request), ToolQuestion)
        tools = question.tools if question.tool_choice == "auto" else ()
        messages = [message.to_json() for message in question.messages]

        def ask() -> Awaitable[Answer]:
            return chat.ask(messages, tools=tools, max_tokens=question.longest, stop=question.stop_texts)

        composer = ToolComposer(question, [[]], chat.writer.tokenizer)
        return await _reply(request, chat, composer, [ask] * question.n)

    async def _completions(self, request: Request) -> Response:
        chat = self._find(request)
        question = read_question(await read_body(request), CompletionQuestion)

        def asking(prompt: str | Sequence[int]) -> Callable[[], Awaitable[Answer]]:
            return lambda: chat.complete(prompt, max_tokens=question.max_tokens, stop=question.stop_texts)

        asks = [asking(prompt) for prompt in question.prompts for _ in range(question.n)]
        composer = CompletionComposer(question, [[] for _ in question.prompts], chat.writer.tokenizer)
        return await _reply(request, chat, composer, asks)

    async def _reward(self, request: Request) -> Response:
        chat = self._find(request)
        try:
            posted = from_json(await read_body(request), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body of the request is not JSON: {error}") from error
        reward = posted.get("reward") if isinstance(posted, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ApiError(400, f'reward={reward!r:.80} must be a number: post {{"reward": 1.0}}', "reward")
        chat.reward = reward
        return JSONResponse({"reward": reward})

    def _find(self, request: Request) -> Chat:
        """The episode that an address names, if the key is right."""
        name = request.path_params["episode"]
        if name not in self._chats:
            message = f"episode '{name}' is not played here: it has ended, or the address is that of another run"
            raise ApiError(404, message, code="episode_not_found")
        chat, key = self._chats[name]
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise ApiError(401, "the key is missing or wrong: send OPENAI_API_KEY", code="invalid_api_key")
        return chat


class _Server(uvicorn.Server):
    """A server that leaves signals to the worker."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


async def _reply(
    request: Request,
    chat: Chat,
    composer: ToolComposer | CompletionComposer,
    asks: Sequence[Callable[[], Awaitable[Answer]]],
) -> Response:
    """Ask, and compose the reply; a stream has everything at once."""
    question = composer.question
    _check_sampling(question, chat)
    answers = await _unless_gone(request, asks)
    if answers is None:
        return Response(status_code=499)  # never read
    composer.prompts = [list(answer.prompt_tokens) for answer in answers[:: question.n]]
    parts = [_part(composer, index, answer) for index, answer in enumerate(answers)]
    if not question.stream:
        return Response(serialized(composer.whole(parts)), media_type="application/json")

    async def events() -> AsyncIterator[bytes]:
        for reply in (*composer.first_chunks(), *map(composer.chunk, parts), *composer.last_chunks()):
            yield event(reply)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _check_sampling(question: Question, chat: Chat) -> None:
    given = question.model_fields_set
    params = chat.rules.params
    named = {name: 0.0 for name in _SAMPLING if name in given}
    if problem := differs(question.distribution, named, params):
        raise ApiError(400, problem, problem.partition("=")[0])
    if question.seed is not None and question.seed != params.seed:
        raise ApiError(400, f"seed={question.seed} differs from the recipe's {params.seed}: leave it out", "seed")


async def _unless_gone(request: Request, asks: Sequence[Callable[[], Awaitable[Answer]]]) -> list[Answer] | None:
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
        raise ApiError(400, str(error), code=error.code) from error
    except asyncio.CancelledError as error:
        if asking.cancelled():
            raise ApiError(503, "the episode has ended") from error
        raise
    finally:
        asking.cancel()
        watching.cancel()


async def _all_of(asks: Sequence[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    """The answers to questions that are asked at once; if one of them is refused, the others are canceled."""
    tasks = [asyncio.ensure_future(ask()) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _part(composer: ToolComposer | CompletionComposer, index: int, answer: Answer) -> ChoicePart:
    """An answer as a choice of a reply."""
    prompt, sibling = divmod(index, composer.question.n)
    reason: Literal["length", "stop"] = "length" if answer.finish_reason == "length" else "stop"
    part = composer.take(Delta(prompt, sibling, answer.tokens, answer.log_probs, reason))
    part.text, part.finish_reason = answer.content, answer.finish_reason
    if isinstance(composer, ToolComposer):
        composer.calls[index] = answer.tool_calls
    return part
