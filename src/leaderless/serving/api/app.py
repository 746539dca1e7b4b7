"""The server of a model: its endpoints, and how it starts and stops."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
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
from leaderless.environments.programs.conversations import AskRefusedError
from leaderless.environments.tools.formats import find_reader, marks_of
from leaderless.rollout.engine import Request, SamplingParams
from leaderless.rollout.shaping import Grammar, Shaping
from leaderless.run.standalone_model import Served
from leaderless.serving.api.anthropic_messages import CountBody
from leaderless.serving.api.chat_apis import CHAT_APIS, ChatApi, listed, model_entry, written
from leaderless.serving.api.chat_requests import ChatQuestion, ChosenFunction
from leaderless.serving.api.engine_thread import MAX_WAITING, EngineHost
from leaderless.serving.api.grammars import Grammars
from leaderless.serving.api.openai_responses import ResponseMemory
from leaderless.serving.api.requests import CompletionQuestion, read_question
from leaderless.serving.api.responses import CompletionComposer, Composer, Reply
from leaderless.serving.api.text_stream import CallReader
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

AnyComposer = CompletionComposer | Composer[ChatQuestion]
Result = TypeVar("Result")
MAX_READERS = 64
"""Sets of tools for which it is remembered how calls of them are read."""


class ApiPrompt(NamedTuple):
    """Token ids of a prompt, and its images with their places among them."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()
    reader: CallReader | None = None
    """Reader of calls of the tools that the prompt offers."""
    grammar: Grammar | None = None
    """Texts that answers may be; None for any."""


def make_app(
    served: Served, host: EngineHost, token: str | None, say: Callable[[str], None] = lambda _: None
) -> Starlette:
    """Make the web application of a model whose engine has a host.

    Clients have to send the token; without one, only programs on this machine are answered. What is worth a line in a
    log is said.
    """
    api = Api(served, host, say)
    routes = [
        Route("/health", api.health),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        *(Route(f"/v1{one.path}", partial(api.chat, one), methods=["POST"], name=one.path) for one in CHAT_APIS),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)], exception_handlers=HANDLERS)


class Api:
    """Answers requests; all methods run in one event loop."""

    def __init__(self, served: Served, host: EngineHost, say: Callable[[str], None]) -> None:
        self._served, self._host, self._say, self._created = served, host, say, int(time.time())
        # A tokenizer may not be used by two threads at once. The engine's thread uses the model's own; a long prompt is
        # encoded in another thread, so that other responses continue.
        self._tokenizer, self._encoder = copy.deepcopy(served.tokenizer), copy.deepcopy(served.tokenizer)
        has_template = self._encoder.chat_template is not None
        self._writer = ChatWriter(self._encoder, is_chat=True, reader=served.reader) if has_template else None
        self._encoding = asyncio.Lock()
        self._readers: OrderedDict[str, CallReader] = OrderedDict()
        self._memory = ResponseMemory()
        self._grammars = Grammars(self._encoder, served.end_tokens, served.vocabulary)

    async def health(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """Report whether requests are answered."""
        if self._host.is_stopping:
            raise ApiError(503, "the engine has ended")
        return JSONResponse({"status": "ok"})

    async def models(self, request: HttpRequest) -> Response:  # noqa: ARG002
        """List the only model."""
        return JSONResponse(listed(self._model()))

    async def model(self, request: HttpRequest) -> Response:
        """Describe the model with a given name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: HttpRequest) -> Response:
        """Complete prompts."""
        question = read_question(await read_body(request), CompletionQuestion)
        self._check_model(question.model)
        prompts = await self._in_thread(partial(self._encode, question))
        params = self._check(question, prompts, "prompt")
        composer = CompletionComposer(question, [prompt.tokens for prompt in prompts], self._tokenizer)
        return await self._answer(request, composer, prompts, params)

    async def chat(self, api: ChatApi, request: HttpRequest) -> Response:
        """Continue a chat."""
        question, make = api.read(await read_body(request), self._memory)
        self._check_model(question.model)
        prompt = await self._in_thread(partial(self._encode_chat, question, api.field))
        params = self._check(question, [prompt], api.field, is_bounded=api.is_bounded)
        return await self._answer(
            request, make(question, [prompt.tokens], self._tokenizer, prompt.reader), [prompt], params
        )

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Count the tokens of a conversation."""
        question = read_question(await read_body(request), CountBody).question()
        self._check_model(question.model)
        prompt = await self._in_thread(partial(self._encode_chat, question, "messages"))
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    def _model(self) -> dict[str, Json]:
        return model_entry(self._served.name, self._created) | {"max_model_len": self._served.max_context}

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"model '{name}' is not served here, only '{self._served.name}'"
            raise ApiError(404, message, "model", "model_not_found")

    async def _in_thread(self, encode: Callable[[], Result]) -> Result:
        async with self._encoding:
            return await asyncio.to_thread(encode)

    def _encode(self, question: CompletionQuestion) -> list[ApiPrompt]:
        prompts = [self._encoder.encode(one) if isinstance(one, str) else one for one in question.prompts]
        if self._served.reader is not None and any(self._served.reader.token in prompt for prompt in prompts):
            message = "prompt has tokens that stand for images: send images to /v1/chat/completions, as parts image_url"
            raise ApiError(400, message, "prompt")
        return [ApiPrompt(prompt) for prompt in prompts]

    def _encode_chat(self, question: ChatQuestion, field: str) -> ApiPrompt:
        if self._writer is None:
            raise ApiError(400, "the model's tokenizer has no chat template: use /v1/completions", field)
        if self._served.reader is None and any(message.has_images for message in question.messages):
            message = f"'{self._served.name}' reads text alone: leave images out, or serve a model that sees them"
            raise ApiError(400, message, field)
        tools = question.offered_tools
        try:
            reader = self._reader_of(tools) if tools else None
            messages, tokens = written(self._writer, question)
            grammar = self._grammar_of(question, reader)
            return ApiPrompt(tokens, self._writer.images(messages, tokens), reader, grammar)
        except AskRefusedError as error:
            raise ApiError(400, str(error), field) from error

    def _grammar_of(self, question: ChatQuestion, reader: CallReader | None) -> Grammar | None:
        if reader is not None and question.demanded_tools:
            may_repeat = question.parallel_tool_calls and not isinstance(question.tool_choice, ChosenFunction)
            return self._grammars.compile_calls(reader.read, question.demanded_tools, may_repeat=may_repeat)
        schema = question.response_format.schema_of_text
        return None if schema is None else self._grammars.compile(schema, "response_format")

    def _reader_of(self, tools: Sequence[Json]) -> CallReader:
        """The reader of the calls that the model writes, which takes some renderings of the chat template to find."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._readers:
            try:
                read = find_reader("auto", self._encoder, tools)
            except RecipeError as error:
                raise ApiError(400, error.problems[0].message, "tools") from error
            self._readers[key] = CallReader(read, marks_of(read), tools)
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        return self._readers[key]

    def _check(
        self,
        question: CompletionQuestion | ChatQuestion,
        prompts: Sequence[ApiPrompt],
        field: str,
        *,
        is_bounded: bool = False,
    ) -> SamplingParams:
        """Check that the model can answer, and return how the engine samples."""
        if len(prompts) * question.n > MAX_RESPONSES:
            message = (
                f"{len(prompts)} prompts with n={question.n} are more than {MAX_RESPONSES} responses: ask for fewer"
            )
            raise ApiError(400, message, "n")
        longest, room = max(len(prompt.tokens) for prompt in prompts), self._served.max_context
        for prompt, *_ in prompts:
            if not prompt:
                raise ApiError(400, f"{field} is empty: give at least one token", field)
            if max(prompt) >= self._served.vocabulary:
                message = f"{field} has token {max(prompt)}, but the model knows {self._served.vocabulary} tokens"
                raise ApiError(400, message, field)
        if longest >= room:
            message = f"{field} has {longest} tokens, but prompt and response may have {room} together: shorten it"
            raise ApiError(400, message, field, "context_length_exceeded")
        max_tokens = room - longest if question.longest is None else question.longest
        max_tokens = min(max_tokens, room - longest) if is_bounded else max_tokens
        if longest + max_tokens > room:
            name = "max_tokens" if question.max_tokens else "max_completion_tokens"
            message = (
                f"{name}={max_tokens} after a prompt of {longest} tokens is more than the {room} that prompt and "
                f"response may have together: ask for at most {room - longest}"
            )
            raise ApiError(400, message, name, "context_length_exceeded")
        for token, _ in question.biases:
            if token >= self._served.vocabulary:
                message = f"logit_bias has token {token}, but the model knows {self._served.vocabulary} tokens"
                raise ApiError(400, message, "logit_bias")
        shaping = _shaping(question, prompts[0].grammar)
        return SamplingParams(question.distribution, max_tokens, question.stop_texts, shaping=shaping)

    async def _answer(
        self, request: HttpRequest, composer: AnyComposer, prompts: Sequence[ApiPrompt], params: SamplingParams
    ) -> Response:
        n, seed = composer.question.n, composer.question.seed
        ids = sample_ids(secrets.randbits(63) if seed is None else seed, len(prompts) * n)
        requests = [
            Request(prompt.tokens, ids[i * n : (i + 1) * n], images=prompt.images) for i, prompt in enumerate(prompts)
        ]
        ticket = self._host.ask(requests, params)

        def end(*, has_left: bool) -> None:
            if self._host.drop(ticket) and has_left:
                what = f"{request.method} {request.url.path}"
                self._say(f"{what}: the client has left after {ticket.num_tokens:,} tokens; the rest is not sampled")

        if composer.question.stream:
            return _CanceledStream(composer.events(composer.take(delta) async for delta in ticket.deltas()), end)

        async def collect() -> Reply:
            return composer.whole([composer.take(delta) async for delta in ticket.deltas()])

        has_left = False
        try:
            reply = await unless_gone(request, collect())
            has_left = reply is None
        finally:
            end(has_left=has_left)
        return reply_with(reply)


class _End(Protocol):
    """What is done when a reply has been sent, or when its client has left."""

    def __call__(self, *, has_left: bool) -> None:
        """Do it once."""


class _CanceledStream(EventStream):
    """Responses as server-sent events, which end when the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], end: _End) -> None:
        super().__init__(self._watched(events))
        self._end, self._is_whole = end, False

    async def _watched(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for one in events:
            yield one
        self._is_whole = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass  # it is no error of the server
        finally:
            self._end(has_left=not self._is_whole)


def _shaping(question: CompletionQuestion | ChatQuestion, grammar: Grammar | None) -> Shaping | None:
    """What a client wants beyond the distribution of tokens; None if nothing."""
    shaping = Shaping(
        question.frequency_penalty,
        question.presence_penalty,
        question.biases,
        grammar,
        question.num_likely,
        isinstance(question, CompletionQuestion) and question.echo and question.wants_log_probs,
    )
    return shaping if shaping.changes_logits or shaping.num_likely or shaping.scores_prompt else None


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

    def __init__(
        self,
        served: Served,
        token: str | None,
        say: Callable[[str], None] = lambda _: None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Prepare the server without starting anything; see `make_app` and `EngineHost`."""
        self._host = EngineHost(served.serving, max_waiting)
        super().__init__(make_app(served, self._host, token, say))

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
