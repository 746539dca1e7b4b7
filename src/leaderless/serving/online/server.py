"""Where clients ask the policy of an online run and say what its responses were worth, while it is trained.

OnlineEntrance reserves the address of a replica -> OnlineService answers at it, in a thread of its own
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from leaderless.base.tokens import TOKEN_VARIABLE
from leaderless.config import Recipe, RecipeError
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Trace
from leaderless.environments.programs.chat import Chat, Rules
from leaderless.environments.programs.program_environment import LazyEndpoint
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner import Plan
from leaderless.rollout.engine import SamplingParams
from leaderless.serving.api.conversations import Asking, RequestOwner
from leaderless.serving.api.openai_responses import ResponseMemory
from leaderless.serving.http_server import HANDLERS, ApiError, Guard, QuietServer, health, parse_body, read_body
from leaderless.serving.listen import address_of, take_port
from leaderless.serving.online.feedback_ledger import Counts, ReplyChoice, ReplyLedger
from leaderless.serving.online.request_queue import OnlineScheduler
from leaderless.stages.episode_rollout import writer_of

LEAVING_S = 2
"""Longest time that clients have to read their last replies when the run ends."""
ENDING = "the run is ending: no step takes what would be answered; ask again when it continues"
LIMITS = "data.max_prompt_tokens + rollout.max_response_tokens"


class OnlineService(Asking):
    """Talks to clients in a thread of its own, from the start of a worker to its end.

    Attributes:
        pump: Queue through which requests reach the engine.
        ledger: Responses to clients, and their feedback.
        params: Distribution from which the policy samples, and the limits of a response.
        group_size: Most responses to a request.
    """

    def __init__(self, recipe: Recipe, writer: ChatWriter, listener: socket.socket, token: str | None) -> None:
        """Begin to listen. No other thread uses the tokenizer of the writer."""
        assert recipe.online is not None
        self._recipe, self._writer, self._listener = recipe, writer, listener
        self.group_size = recipe.batch.responses_per_prompt
        self.pump, self.ledger = OnlineScheduler(), ReplyLedger(recipe.online, self.group_size)
        self._doorway, self._memory = LazyEndpoint(), ResponseMemory()
        rollout = recipe.rollout
        self.params = SamplingParams(rollout, rollout.max_response_tokens, rollout.stop, recipe.seed)
        app = Starlette(
            routes=[
                Route("/health", health),
                *self.routes(""),
                Route("/v1/feedback", self._feedback, methods=["POST"]),
            ],
            middleware=[Middleware(Guard, token=token)],
            exception_handlers=HANDLERS,
        )
        # Around everything, as errors that no handler expects are answered outside of all middleware.
        self._server = QuietServer(_Counter(app, self.ledger.counts), LEAVING_S)
        try:
            listener.listen(self._server.config.backlog)
        except OSError as error:  # another program has begun to listen since the address was reserved
            raise RecipeError.at("online.port", f"{self.address} cannot be listened to: {error}") from error
        serve = partial(self._server.serve, sockets=[listener])
        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="desk", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where clients ask."""
        return f"http://{address_of(self._listener)}/v1"

    @override
    def find(self, request: Request, body: bytes) -> RequestOwner:
        if request.method == "POST" and not request.url.path.endswith("/count_tokens"):
            self.ledger.counts.add("requests")
        arrived_s, num_leavings, began_idle = time.monotonic(), self.pump.num_leavings, not self.pump.is_serving

        def replied(identity: str, chats: Sequence[Chat]) -> None:
            is_crossed = began_idle or self.pump.num_leavings > num_leavings
            self.ledger.counts.replied(time.monotonic() - arrived_s, is_crossed=is_crossed)
            self.ledger.add(identity, arrived_s, [ReplyChoice(chat.trace, chat.seconds) for chat in chats])

        return RequestOwner(self._writer, self.params, self._open, self._memory, replied)

    def close(self) -> None:
        """Give whoever waits an error, and listen no more."""
        self.pump.close(ApiError(503, ENDING, code="run_ending"))
        self._server.should_exit = True
        self._thread.join(timeout=LEAVING_S + 5.0)
        self._listener.close()

    async def _feedback(self, request: Request) -> Response:
        posted = parse_body(await read_body(request), allow_inf_nan=True)  # which is refused by its name
        if not isinstance(posted, Mapping):
            raise ApiError(400, 'the body of the request must be an object: {"id": "…", "feedback": "accepted"}')
        reward = self.ledger.judge(posted)
        self.pump.wake()
        return JSONResponse({"id": posted["id"], "choice": posted.get("choice", 0), "reward": reward})

    def _open(self, num: int) -> Sequence[Chat]:
        """A conversation for each response to a request."""
        if num > self.group_size:
            raise ApiError(
                400,
                f"{num} responses are more than the {self.group_size} of a group, which they are compared in: "
                "ask for fewer, or raise batch.responses_per_prompt",
                "n",
            )
        return [self._chat() for _ in range(num)]

    def _chat(self) -> Chat:
        recipe, writer, number = self._recipe, self._writer, f"{self._recipe.seed}/{uuid.uuid4().hex}"
        assert recipe.online is not None
        rules = Rules(
            number=number,
            seed=number,
            params=self.params,
            max_tokens=recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens,
            max_turns=1,
            tool_format=recipe.online.tool_format,
            limits=LIMITS,
        )
        return Chat(rules, writer, Trace(), self.pump, self._doorway)


class _Counter:
    """Counts replies that are errors of the server."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 500:
                self._counts.add("failed")
            await send(message)

        await self._app(scope, receive, counted)


class OnlineEntrance:
    """The address of the replica of a rank; ranks that do not sample have none."""

    def __init__(self, recipe: Recipe, plan: Plan, rank: int) -> None:
        """Take the address, at which nobody is answered yet.

        Raises:
            RecipeError: It is taken, or other machines reach it and there is no token.
        """
        config, self._node = recipe.online, next(node for node in plan.nodes if node.spec.samples)
        assert config is not None, "only online runs have clients"
        self._replica = self._node.layout.shard_of(rank) if rank in self._node.layout else None
        self._service: OnlineService | None = None
        if self._replica is not None:
            port = config.port and config.port + self._replica
            self._token = os.environ.get(TOKEN_VARIABLE) or None
            self._listener = take_port(config.host, port, self._token, "online")

    def open(self, recipe: Recipe, tokenizer: Tokenizer) -> OnlineService | None:
        """Answer clients as soon as the first step begins."""
        if self._replica is not None:
            (data,) = recipe.data.train_sets().values()
            writer = writer_of(copy.deepcopy(tokenizer), data)  # no two threads may use one
            self._service = OnlineService(self._node.settings_of(recipe), writer, self._listener, self._token)
        return self._service

    def say(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        """Write the addresses of all replicas into the folder of the run."""
        folder, service, size = directory.doors, self._service, self._node.layout.dp
        if service is None:
            say(f"clients: the addresses are in {folder}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / str(self._replica), f"{service.address}\n")
        others = f", replica {self._replica} of {size}; all addresses are in {folder}" if size > 1 else ""
        say(f"clients: {service.address}{others}")
