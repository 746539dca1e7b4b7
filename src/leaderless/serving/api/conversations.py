"""Questions in the formats of several APIs, answered by the conversations of a run.

client -> Asking.chat, Asking.completions -> RequestOwner.chats -> Chat.ask of each choice -> reply
|
EpisodeServer here for programs, OnlineService for clients of online runs
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.programs.chat import Admission, Chat, ChatAnswer, ProgramEndpoint
from leaderless.environments.programs.conversations import AskRefusedError
from leaderless.rollout.engine import Delta, SamplingParams
from leaderless.serving.api.anthropic_messages import CountBody
from leaderless.serving.api.chat_apis import CHAT_APIS, ChatApi, listed, model_entry, written
from leaderless.serving.api.chat_requests import ChatQuestion
from leaderless.serving.api.openai_responses import ResponseMemory
from leaderless.serving.api.requests import ApiRequest, CompletionQuestion, read_question
from leaderless.serving.api.responses import ChoicePart, CompletionComposer, Composer
from leaderless.serving.http_server import (
    HANDLERS,
    ApiError,
    EventStream,
    QuietServer,
    has_key,
    parse_body,
    read_body,
    reply_with,
    unless_gone,
)
from leaderless.serving.listen import address_of, take_port

Ask = Callable[[Chat], Awaitable[ChatAnswer]]
_SHARED = "/shared"
"""Begin of the paths of all episodes, where the model of a request names the episode."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_OTHER_DISTRIBUTION = "answers would be sampled from another distribution than the one that is trained"
_ONE_LOG_PROB = "engines report the log-probability of the sampled token only"
_UNTRAINED = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias", "response_format"), _OTHER_DISTRIBUTION),
    **dict.fromkeys(("echo", "top_logprobs"), _ONE_LOG_PROB),
}
"""Fields that only served models can follow, and why."""


@dataclass(frozen=True)
class RequestOwner:
    """Who answers a request.

    Attributes:
        writer: Writer of messages for the policy.
        params: Distribution from which it samples.
        chats: Function that gives the conversation in which each of some responses is asked for.
        memory: Responses that requests may continue by their names.
        replied: Function that notes that all are there, with the name that the client knows them by.
    """

    writer: ChatWriter
    params: SamplingParams
    chats: Callable[[int], Sequence[Chat]]
    memory: ResponseMemory
    replied: Callable[[str, Sequence[Chat]], None] = lambda *_: None


class Asking(ABC):
    """Endpoints that ask whoever an address stands for."""

    @abstractmethod
    def find(self, request: Request, body: bytes) -> RequestOwner:
        """Who answers a request with a body.

        Raises:
            ApiError: Nobody does.
        """

    def routes(self, before: str) -> list[Route]:
        """The endpoints, whose paths begin with the same."""
        chats = [
            Route(f"{before}/v1{api.path}", partial(self.chat, api), methods=["POST"], name=api.path)
            for api in CHAT_APIS
        ]
        return [
            Route(f"{before}/v1/models", self.models),
            *chats,
            Route(f"{before}/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route(f"{before}/v1/completions", self.completions, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """List the only model."""
        self.find(request, b"")
        return JSONResponse(listed(model_entry("policy", 0)))

    async def chat(self, api: ChatApi, request: Request) -> Response:
        """Continue a chat."""
        body = await read_body(request)
        asked = self.find(request, body)
        question, make = api.read(body, asked.memory)
        messages = [message.to_json() for message in question.messages]

        def ask(chat: Chat) -> Awaitable[ChatAnswer]:
            return chat.ask(
                messages,
                tools=question.offered_tools,
                max_tokens=question.longest,
                stop=question.stop_texts,
                template=question.chat_template_kwargs,
            )

        composer = make(question, [[]], asked.writer.tokenizer, None)
        return await _reply(request, asked, composer, [ask] * question.n)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation, written from its beginning."""
        body = await read_body(request)
        asked = self.find(request, body)
        question = read_question(body, CountBody).question()
        try:
            return JSONResponse({"input_tokens": len(written(asked.writer, question)[1])})
        except AskRefusedError as error:
            raise ApiError(400, str(error), code=error.code) from error

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        body = await read_body(request)
        asked = self.find(request, body)
        question = read_question(body, CompletionQuestion)

        def asking(prompt: str | Sequence[int]) -> Ask:
            return lambda chat: chat.complete(prompt, max_tokens=question.max_tokens, stop=question.stop_texts)

        asks = [asking(prompt) for prompt in question.prompts for _ in range(question.n)]
        composer = CompletionComposer(question, [[] for _ in question.prompts], asked.writer.tokenizer)
        return await _reply(request, asked, composer, asks)


AnyComposer = Composer[ChatQuestion] | CompletionComposer


async def _reply(request: Request, asked: RequestOwner, composer: AnyComposer, asks: Sequence[Ask]) -> Response:
    """Ask, and compose the reply; a stream has everything at once."""
    question = composer.question
    _check_sampling(question, asked.params)
    chats = asked.chats(len(asks))
    try:
        answers = await unless_gone(request, _all_of(asks, chats))
    except AskRefusedError as error:
        raise ApiError(503 if error.code == "aborted" else 400, str(error), code=error.code) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ApiError(503, "the episode has ended") from error
    if answers is None:
        return reply_with(None)
    asked.replied(composer.id, chats)
    composer.prompts = [list(answer.prompt_tokens) for answer in answers[:: question.n]]
    parts = [_part(composer, index, answer) for index, answer in enumerate(answers)]
    if not question.stream:
        return reply_with(composer.whole(parts))

    async def given() -> AsyncIterator[ChoicePart]:
        for part in parts:
            yield part

    return EventStream(composer.events(given()))


def _check_sampling(question: ApiRequest, params: SamplingParams) -> None:
    for name in (name for name in _SAMPLING if name in question.model_fields_set):
        wanted, own = getattr(question, name), getattr(params.distribution, name)
        if wanted != own:
            message = (
                f"{name}={wanted:g} differs from the recipe's {own:g}, under which log-probabilities are trained: "
                f"leave it out, or set rollout.{name}"
            )
            raise ApiError(400, message, name)
    for name, reason in _UNTRAINED.items():
        field = type(question).model_fields.get(name)
        if field is not None and getattr(question, name) != field.get_default(call_default_factory=True):
            raise ApiError(400, f"{name} is not supported here: {reason}; leave it out", name)
    if isinstance(question, CompletionQuestion) and question.num_likely:
        raise ApiError(400, f"logprobs={question.num_likely} must be 0 here: {_ONE_LOG_PROB}", "logprobs")
    if isinstance(question, ChatQuestion) and question.demanded_tools:
        raise ApiError(400, "tool_choice must be auto or none: no call can be enforced in training", "tool_choice")
    if question.seed is not None and question.seed != params.seed:
        raise ApiError(400, f"seed={question.seed} differs from the recipe's {params.seed}: leave it out", "seed")


async def _all_of(asks: Sequence[Ask], chats: Sequence[Chat]) -> list[ChatAnswer]:
    """The answers to questions that are asked at once; if one of them is refused, the others are canceled."""
    tasks = [asyncio.ensure_future(ask(chat)) for ask, chat in zip(asks, chats, strict=True)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _part(composer: AnyComposer, index: int, answer: ChatAnswer) -> ChoicePart:
    """An answer as a choice of a reply."""
    prompt, sibling = divmod(index, composer.question.n)
    reason: Literal["length", "stop"] = "length" if answer.finish_reason == "length" else "stop"
    part = composer.take(Delta(prompt, sibling, answer.tokens, answer.log_probs, reason))
    part.text, part.finish_reason, part.calls = answer.content, answer.finish_reason, answer.tool_calls
    return part


_HOST = "127.0.0.1"


class EpisodeServer(Asking, ProgramEndpoint):
    """Server in the event loop of the episodes, on a free port that only this machine reaches.

    The next server of the process has the same port, as other servers may keep a client for each address.
    """

    _port: ClassVar[int] = 0

    def __init__(self) -> None:
        """Listen; nothing is answered before an episode is admitted."""
        self._chats: dict[str, tuple[Chat, str]] = {}
        self._memories: WeakKeyDictionary[Chat, ResponseMemory] = WeakKeyDictionary()
        self._listener = self._listen()
        app = Starlette(
            routes=[
                *self.routes(_SHARED),
                *self.routes("/episodes/{episode}"),
                Route("/episodes/{episode}/v1/reward", self._reward, methods=["POST"]),
            ],
            exception_handlers=HANDLERS,
        )
        self._server = QuietServer(app)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))

    @classmethod
    def _listen(cls) -> socket.socket:
        try:
            listener = take_port(_HOST, cls._port, None)
            listener.listen()
        except (OSError, RecipeError):  # another server has it, such as that of the process that has forked this one
            listener = take_port(_HOST, 0, None)
            listener.listen()
        cls._port = listener.getsockname()[1]
        return listener

    @override
    def admit(self, chat: Chat) -> Admission:
        name, key = secrets.token_hex(8), secrets.token_urlsafe(16)
        self._chats[name] = (chat, key)
        root = f"http://{address_of(self._listener)}"
        return Admission(f"{root}/episodes/{name}/v1", key, f"{root}{_SHARED}/v1", f"{name}.{key}")

    @override
    def dismiss(self, chat: Chat) -> None:
        self._chats = {name: entry for name, entry in self._chats.items() if entry[0] is not chat}

    @override
    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        self._listener.close()

    async def _reward(self, request: Request) -> Response:
        chat = self._chat_at(request)
        posted = parse_body(await read_body(request))
        reward = posted.get("reward") if isinstance(posted, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ApiError(400, f'reward={reward!r:.80} must be a number: post {{"reward": 1.0}}', "reward")
        chat.reward = reward
        return JSONResponse({"reward": reward})

    @override
    def find(self, request: Request, body: bytes) -> RequestOwner:
        # The chat which all requests ask; what is said is in its trace.
        chat = self._chat_at(request) if "episode" in request.path_params else self._chat_named_in(body)
        memory = self._memories.setdefault(chat, ResponseMemory())
        return RequestOwner(chat.writer, chat.rules.params, lambda num: [chat] * num, memory)

    def _chat_at(self, request: Request) -> Chat:
        """The episode that an address names, if the key is right."""
        name = request.path_params["episode"]
        if name not in self._chats:
            message = f"episode '{name}' is not played here: it has ended, or the address is that of another run"
            raise ApiError(404, message, code="episode_not_found")
        chat, key = self._chats[name]
        if not has_key(request.headers, key):
            raise ApiError(401, "the key is missing or wrong: send OPENAI_API_KEY", code="invalid_api_key")
        return chat

    def _chat_named_in(self, body: bytes) -> Chat:
        """The episode that the model of a request names, with its key."""
        asked = parse_body(body) if body else None
        model = str(asked.get("model")) if isinstance(asked, dict) else ""
        name, _, key = model.partition(".")
        chat, wanted = self._chats.get(name, (None, ""))
        if chat is None or not hmac.compare_digest(key.encode(), wanted.encode()):
            message = f"model '{name}' is no episode that is played here: ask for the model that the episode was given"
            raise ApiError(404, message, "model", "episode_not_found")
        return chat
