"""A server within a run: programs that lead episodes ask the policy in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.programs.chat import Chat
from leaderless.rollout.engine import SamplingParams
from leaderless.serving.api.conversations import HANDLERS, Asking, QuietServer, RequestOwner
from leaderless.serving.api.errors import ApiError
from leaderless.serving.api.json_bodies import parse_body, read_body
from leaderless.serving.api.uvicorn_config import uvicorn_config
from leaderless.serving.listen import address_of, take_port

HOST = "127.0.0.1"


class EpisodeServer(Asking):
    """Server in the event loop of the episodes, on a free port that only this machine reaches."""

    def __init__(self) -> None:
        """Listen; nothing is answered before an episode is admitted."""
        self._chats: dict[str, tuple[Chat, str]] = {}
        self._listener = take_port(HOST, 0, None)
        self._listener.listen()
        app = Starlette(
            routes=[
                Route("/episodes/{episode}/v1/models", self.models),
                Route("/episodes/{episode}/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/episodes/{episode}/v1/completions", self.completions, methods=["POST"]),
                Route("/episodes/{episode}/v1/reward", self._reward, methods=["POST"]),
            ],
            exception_handlers=HANDLERS,
        )
        self._server = QuietServer(uvicorn_config(app))
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))

    def admit(self, chat: Chat) -> tuple[str, str]:
        """Admit a chat under an address and a key of its own."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(16)
        self._chats[name] = (chat, key)
        return f"http://{address_of(self._listener)}/episodes/{name}/v1", key

    def dismiss(self, chat: Chat) -> None:
        """Answer no more requests of a chat."""
        self._chats = {name: entry for name, entry in self._chats.items() if entry[0] is not chat}

    async def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        self._listener.close()

    async def _reward(self, request: Request) -> Response:
        chat = self.find(request).chat
        posted = parse_body(await read_body(request))
        reward = posted.get("reward") if isinstance(posted, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ApiError(400, f'reward={reward!r:.80} must be a number: post {{"reward": 1.0}}', "reward")
        chat.reward = reward
        return JSONResponse({"reward": reward})

    def find(self, request: Request) -> _Episode:
        """The episode that an address names, if the key is right."""
        name = request.path_params["episode"]
        if name not in self._chats:
            message = f"episode '{name}' is not played here: it has ended, or the address is that of another run"
            raise ApiError(404, message, code="episode_not_found")
        chat, key = self._chats[name]
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), key.encode()):
            raise ApiError(401, "the key is missing or wrong: send OPENAI_API_KEY", code="invalid_api_key")
        return _Episode(chat)


@dataclass(frozen=True)
class _Episode(RequestOwner):
    """Owner of all requests at the address of an episode, which ask the same conversation."""

    chat: Chat

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.writer.tokenizer

    @property
    def params(self) -> SamplingParams:
        return self.chat.rules.params

    def chats(self, num: int) -> Sequence[Chat]:
        return [self.chat] * num

    def replied(self, identity: str, chats: Sequence[Chat]) -> None:
        """Keep nothing: the episode has it."""
