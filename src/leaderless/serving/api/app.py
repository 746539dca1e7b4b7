"""The server of a model: its endpoints, and how it starts and stops."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.rollout import MAX_RESPONSES
from leaderless.data.prompts.images import PromptImage
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.programs.conversations import AskRefusedError, checked
from leaderless.rollout.engine import Request, SamplingParams
from leaderless.run.standalone_model import Served
from leaderless.serving.api.engine_thread import EngineHost, Ticket
from leaderless.serving.api.requests import ChatQuestion, CompletionQuestion, read_question
from leaderless.serving.api.responses import AnyQuestion, ChatComposer, CompletionComposer, Reply
from leaderless.serving.http_server import (
    HANDLERS,
    ApiError,
    EventStream,
    Guard,
    WebServer,
    read_body,
    reply_with,
    unless_gone,
)

AnyComposer = CompletionComposer | ChatComposer


class ApiPrompt(NamedTuple):
    """Token ids of a prompt, and its images with their places among them."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()


def make_app(served: Served, host: EngineHost, token: str | None) -> Starlette:
    """Make the web application of a model whose engine has a host.

    Clients have to send the token; without one, only programs on this machine are answered.
    """
    api = Api(served, host)
    routes = [
        Route("/health", api.health),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)], exception_handlers=HANDLERS)


class Api:
    """Answers requests; all methods run in one event loop."""

    def __init__(self, served: Served, host: EngineHost) -> None:
        self._served, self._host, self._created = served, host, int(time.time())
        # A tokenizer may not be used by two threads at once. The engine's thread uses the model's own; a long prompt is
        # encoded in another thread, so that other responses continue.
        self._tokenizer, self._encoder = copy.deepcopy(served.tokenizer), copy.deepcopy(served.tokenizer)
        has_template = self._encoder.chat_template is not None
        self._writer = ChatWriter(self._encoder, is_chat=True, reader=served.reader) if has_template else None
        self._encoding = asyncio.Lock()

    async def health(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """Report whether requests are answered."""
        if self._host.is_stopping:
            raise ApiError(503, "the engine has ended")
        return JSONResponse({"status": "ok"})

    async def models(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """List the only model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """Describe the model with a given name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: HttpRequest) -> Response:
        """Complete prompts."""
        question = read_question(await read_body(request), CompletionQuestion)
        prompts = await self._in_thread(self._encode, question)
        params = self._check(question, prompts, "prompt")
        composer = CompletionComposer(question, [prompt.tokens for prompt in prompts], self._tokenizer)
        return await self._answer(request, composer, prompts, params)

    async def chat(self, request: HttpRequest) -> Response:
        """Continue a chat."""
        question = read_question(await read_body(request), ChatQuestion)
        prompts = await self._in_thread(self._encode_chat, question)
        params = self._check(question, prompts, "messages")
        composer = ChatComposer(question, [prompt.tokens for prompt in prompts], self._tokenizer)
        return await self._answer(request, composer, prompts, params)

    def _model(self) -> Json:
        fixed: dict[str, Json] = {"object": "model", "created": self._created, "owned_by": "leaderless"}
        return {"id": self._served.name, **fixed, "max_model_len": self._served.max_context}

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"model '{name}' is not served here, only '{self._served.name}'"
            raise ApiError(404, message, "model", "model_not_found")

    async def _in_thread(
        self, encode: Callable[[AnyQuestion], list[ApiPrompt]], question: AnyQuestion
    ) -> list[ApiPrompt]:
        self._check_model(question.model)
        async with self._encoding:
            return await asyncio.to_thread(encode, question)

    def _encode(self, question: CompletionQuestion) -> list[ApiPrompt]:
        prompts = [self._encoder.encode(one) if isinstance(one, str) else one for one in question.prompts]
        if self._served.reader is not None and any(self._served.reader.token in prompt for prompt in prompts):
            message = "prompt has tokens that stand for images: send images to /v1/chat/completions, as parts image_url"
            raise ApiError(400, message, "prompt")
        return [ApiPrompt(prompt) for prompt in prompts]

    def _encode_chat(self, question: ChatQuestion) -> list[ApiPrompt]:
        if self._writer is None:
            raise ApiError(400, "the model's tokenizer has no chat template: use /v1/completions", "messages")
        sees_images = self._served.reader is not None
        if not sees_images and any(message.has_images for message in question.messages):
            message = f"'{self._served.name}' reads text alone: leave images out, or serve a model that sees them"
            raise ApiError(400, message, "messages")
        try:
            messages = [checked(message.to_json(), sees_images=sees_images) for message in question.messages]
            tokens = self._writer.fresh(messages)
            return [ApiPrompt(tokens, self._writer.images(messages, tokens))]
        except AskRefusedError as error:
            raise ApiError(400, str(error), "messages") from error
        except RecipeError as error:
            raise ApiError(400, error.problems[0].message, "messages") from error

    def _check(
        self, question: CompletionQuestion | ChatQuestion, prompts: Sequence[ApiPrompt], field: str
    ) -> SamplingParams:
        """Check that the model can answer, and return how the engine samples."""
        if len(prompts) * question.n > MAX_RESPONSES:
            message = (
                f"{len(prompts)} prompts with n={question.n} are more than {MAX_RESPONSES} responses: ask for fewer"
            )
            raise ApiError(400, message, "n")
        longest, room = max(len(prompt.tokens) for prompt in prompts), self._served.max_context
        for prompt, _ in prompts:
            if not prompt:
                raise ApiError(400, f"{field} is empty: give at least one token", field)
            if max(prompt) >= self._served.vocabulary:
                message = f"{field} has token {max(prompt)}, but the model knows {self._served.vocabulary} tokens"
                raise ApiError(400, message, field)
        if longest >= room:
            message = f"{field} has {longest} tokens, but prompt and response may have {room} together: shorten it"
            raise ApiError(400, message, field, "context_length_exceeded")
        max_tokens = room - longest if question.longest is None else question.longest
        if longest + max_tokens > room:
            name = "max_tokens" if question.max_tokens else "max_completion_tokens"
            message = (
                f"{name}={max_tokens} after a prompt of {longest} tokens is more than the {room} that prompt and "
                f"response may have together: ask for at most {room - longest}"
            )
            raise ApiError(400, message, name, "context_length_exceeded")
        return SamplingParams(question.distribution, max_tokens, question.stop_texts)

    async def _answer(
        self, request: HttpRequest, composer: AnyComposer, prompts: Sequence[ApiPrompt], params: SamplingParams
    ) -> Response:
        n, seed = composer.question.n, composer.question.seed
        ids = sample_ids(secrets.randbits(63) if seed is None else seed, len(prompts) * n)
        requests = [
            Request(prompt.tokens, ids[i * n : (i + 1) * n], images=prompt.images) for i, prompt in enumerate(prompts)
        ]
        ticket = self._host.ask(requests, params)
        if composer.question.stream:
            return _CanceledStream(self._host, ticket, composer)

        async def collect() -> Reply:
            return composer.whole([composer.take(delta) async for delta in ticket.deltas()])

        try:
            return reply_with(await unless_gone(request, collect()))
        finally:
            self._host.drop(ticket)


class _CanceledStream(EventStream):
    """Responses as server-sent events; canceled when the client disconnects."""

    def __init__(self, host: EngineHost, ticket: Ticket, composer: AnyComposer) -> None:
        super().__init__(composer.events(composer.take(delta) async for delta in ticket.deltas()))
        self._host, self._ticket = host, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._host.drop(self._ticket)


def sample_ids(seed: int, count: int) -> range:
    """Choose ids for the responses to a request, in the order of their choices; they key the sampling noise.

    The seed of the request is part of the ids, while the engine has one seed for all requests: the native engine draws
    tokens together if only the ids differ.
    """
    first = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:7])
    return range(first, first + count)


class ModelServer(WebServer):
    """Answers requests until a signal arrives or the engine fails.

    When it stops, it cancels unfinished responses before it waits for clients to disconnect.
    """

    def __init__(self, served: Served, token: str | None) -> None:
        """Prepare the server without starting anything; see `make_app` for the token."""
        self._host = EngineHost(served.serving)
        super().__init__(make_app(served, self._host, token))

    def news(self) -> str:
        """Describe what is answered and has been so far; empty if there is nothing new since the last call."""
        return self._host.news()

    @override
    async def answer(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Answer requests until `should_exit` is set, or raise the error with which the engine failed."""
        with self._host:
            if await self._host.begun():
                await super().answer(listener, started)

    @override
    async def on_tick(self, counter: int) -> bool:
        """Also stop when the host is stopping."""
        return await super().on_tick(counter) or self._host.is_stopping

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._host.stop()
        await super().shutdown(sockets)
