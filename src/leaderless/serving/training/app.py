"""The endpoints of the Tinker API, and how their server starts and stops."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.serving.http_server import HANDLERS, ApiError, Guard, WebServer, read_body
from leaderless.serving.training.listing import Listing
from leaderless.serving.training.promises import RETRY_S, TooManyRequestsError
from leaderless.serving.training.requests import (
    AnyTinkerRequest,
    ClientQuestion,
    FutureQuestion,
    LoadRequest,
    ModelName,
    NewModel,
    NewSampler,
    NewSession,
    SampleRequest,
    SamplerName,
    SamplerRequest,
    SaveRequest,
    SessionName,
    StepRequest,
    check_version,
    place_of,
    read_request,
)
from leaderless.serving.training.service import TrainingService
from leaderless.serving.training.turns import Failure, Promise
from leaderless.serving.training.wire import read_pass_request

API = "/api/v1"
KEY_PREFIX = "tml-"
"""Start of every API key; the client refuses others."""
PROTOBUF = "application/x-protobuf"
POLL_S = 20.0
"""Longest time that a question for a result waits for it; the client gives up after 45 s."""
TICKS = 10
"""Ticks of the server, ten a second, between two looks for clients that are silent."""
NOTE = "adapters are on linear layers of the decoder; the unembedding has none, also with train_unembed=True"


class KeyGuard(Guard):
    """Accepts clients whose key is the token, with the beginning that Tinker's client wants of keys."""

    kinds = ("application/json", PROTOBUF)
    open_path = f"{API}/healthz"

    @override
    def refusal(self, error: ApiError, path: str) -> Response:
        return JSONResponse(error.to_json(), error.status)

    @override
    def objection_to_key(self, headers: Headers, token: str) -> ApiError | None:
        wanted = KEY_PREFIX + token.removeprefix(KEY_PREFIX)
        if hmac.compare_digest(headers.get("x-api-key", "").encode("latin-1"), wanted.encode()):
            return None
        message = f"the API key is missing or wrong: it is '{KEY_PREFIX}' and the token of the server"
        return ApiError(401, message, code="invalid_api_key")


def make_training_app(service: TrainingService, token: str | None) -> Starlette:
    """Make the web application of a service; see `KeyGuard` for the token."""
    api, listing = _Api(service), Listing(service)
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "client/config": api.config,
        "client/dynamic_config": api.dynamic_config,
        "create_session": api.create_session,
        "session_heartbeat": api.heartbeat,
        "create_model": api.create_model,
        "get_info": api.info,
        "forward_backward": api.passes,
        "optim_step": api.step,
        "save_weights": api.save,
        "save_weights_for_sampler": api.save_for_sampler,
        "load_weights": api.load,
        "create_sampling_session": api.create_sampler,
        "join_sampling_session": api.join_sampler,
        "asample": api.sample,
        "cancel_future": api.cancel,
        "retrieve_future": api.result,
        "telemetry": api.telemetry,
        "weights_info": listing.weights_info,
        "sessions/{session_id}/finish": api.finish,
    }
    gets = {
        "healthz": api.health,
        "get_server_capabilities": listing.capabilities,
        "samplers/{sampler_id}": listing.sampler,
        "training_runs": listing.runs,
        "training_runs/{run_id}": listing.run,
        "training_runs/{run_id}/checkpoints": listing.states,
        "checkpoints": listing.all_states,
        "sessions": listing.sessions,
        "sessions/{session_id}": listing.session,
    }
    routes = [Route(f"{API}/{path}", work, methods=["POST"]) for path, work in posts.items()]
    routes += [Route(f"{API}/{path}", work) for path, work in gets.items()]
    removal = "training_runs/{run_id}/checkpoints/{kind}/{name}"
    routes.append(Route(f"{API}/{removal}", listing.remove, methods=["DELETE"]))
    handlers = {**HANDLERS, TooManyRequestsError: _ask_again}
    return Starlette(routes=routes, middleware=[Middleware(KeyGuard, token=token)], exception_handlers=handlers)


async def _ask_again(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Tell a client that sends too much when to ask again."""
    found = cast("TooManyRequestsError", error)
    return JSONResponse(found.to_json(), found.status, {"retry-after": str(RETRY_S)})


def _future(promise: Promise, sample_names: list[str] | None = None) -> Response:
    """The name under which a client asks for a result."""
    found: dict[str, Json] = {"request_id": promise.request_id}
    if sample_names is not None:
        found["sample_sequence_ids"] = [*sample_names]
    return JSONResponse(found)


async def _read(request: Request, kind: type[AnyTinkerRequest]) -> AnyTinkerRequest:
    return read_request(await read_body(request), kind)


class _Api:
    """Answers requests for training and samples; all methods run in one event loop."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        if self._service.is_stopping:
            raise ApiError(503, "the service has ended")
        return JSONResponse({"status": "ok"})

    async def config(self, request: Request) -> Response:
        check_version((await _read(request, ClientQuestion)).sdk_version)
        return JSONResponse({"pjwt_auth_enabled": False, "sample_join_sampling_session": True})

    async def dynamic_config(self, request: Request) -> Response:
        await _read(request, ClientQuestion)
        return JSONResponse({"sample_cancel_enabled": True})

    async def create_session(self, request: Request) -> Response:
        wanted = await _read(request, NewSession)
        warning = check_version(wanted.sdk_version)
        answer = {"type": "create_session", "session_id": self._service.new_session(wanted), "info_message": NOTE}
        return JSONResponse({**answer, "warning_message": warning} if warning else answer)

    async def heartbeat(self, request: Request) -> Response:
        wanted = await _read(request, SessionName)
        try:
            self._service.session(wanted.session_id).see()
        except ApiError as error:
            raise ApiError(410, error.message) from error  # the client stops asking
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        self._service.session(session_id)
        self._service.end_session(session_id, Failure("the client has ended", is_users=True))
        return JSONResponse({})

    async def telemetry(self, request: Request) -> Response:
        """Accept what clients say of themselves, and keep none of it."""
        await read_body(request)
        return JSONResponse({"status": "accepted"})

    async def create_model(self, request: Request) -> Response:
        return _future(self._service.new_model(await _read(request, NewModel)))

    async def info(self, request: Request) -> Response:
        run = self._service.run((await _read(request, ModelName)).model_id)
        model = self._service.model
        data = {"arch": model.arch, "model_name": run.base_model, "tokenizer_id": model.config.path}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": run.run_id,
                "model_data": data,
                "model_name": run.base_model,
                "is_lora": True,
                "lora_rank": run.shape.rank,
            }
        )

    async def passes(self, request: Request) -> Response:
        body = await read_body(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != PROTOBUF or request.headers.get("content-encoding"):
            raise ApiError(415, f"forward_backward must be sent as {PROTOBUF}, not compressed, as by tinker 0.38")
        try:
            wanted = read_pass_request(body)
        except (ValueError, StopIteration) as error:
            raise ApiError(400, f"the body of the request is no ForwardBackwardRequest: {error}") from error
        if wanted.seq_id < 1:
            raise ApiError(400, f"seq_id={wanted.seq_id} must be at least 1", "seq_id")
        return _future(self._service.do_passes(wanted, len(body)))

    async def step(self, request: Request) -> Response:
        return await self._ordered(request, StepRequest, self._service.do_step)

    async def save(self, request: Request) -> Response:
        return await self._ordered(request, SaveRequest, self._service.do_save)

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._ordered(request, SamplerRequest, self._service.do_save_for_sampler)

    async def load(self, request: Request) -> Response:
        return await self._ordered(request, LoadRequest, self._service.do_load)

    async def _ordered(
        self, request: Request, kind: type[AnyTinkerRequest], do: Callable[[AnyTinkerRequest], Promise]
    ) -> Response:
        """Take a request whose number is used up even if it is refused, or those after it would wait for ever."""
        body = await read_body(request)
        try:
            return _future(do(read_request(body, kind)))
        except ApiError as error:
            place = place_of(body) if error.status == 400 else None
            if place is None:
                raise
            return _future(self._service.refuse(*place, error))

    async def create_sampler(self, request: Request) -> Response:
        sampler_id = await self._service.new_sampler(await _read(request, NewSampler))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def join_sampler(self, request: Request) -> Response:
        number = self._service.join_sampler((await _read(request, SamplerName)).sampling_session_id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": number})

    async def sample(self, request: Request) -> Response:
        body = await read_body(request)
        return _future(*self._service.do_sample(read_request(body, SampleRequest), len(body)))

    async def cancel(self, request: Request) -> Response:
        self._service.cancel((await _read(request, FutureQuestion)).request_id)
        return JSONResponse({})

    async def result(self, request: Request) -> Response:
        """The result of a request, as soon as it is there."""
        request_id = (await _read(request, FutureQuestion)).request_id
        outcome = await self._service.session(request_id).result(request_id, POLL_S)
        if outcome is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        if isinstance(outcome, Failure):
            return JSONResponse({"error": outcome.message, "category": "user" if outcome.is_users else "server"})
        return Response(outcome, media_type=PROTOBUF) if isinstance(outcome, bytes) else JSONResponse(outcome)


class TrainingServer(WebServer):
    """Answers clients until a signal arrives or the service fails."""

    def __init__(self, service: TrainingService, token: str | None) -> None:
        """Prepare the server without starting anything; see `KeyGuard` for the token."""
        self._service = service
        super().__init__(make_training_app(service, token))

    @override
    async def answer(self, listener: socket.socket, started: Callable[[], None]) -> None:
        self._service.start()
        try:
            await super().answer(listener, started)
        finally:
            self._service.stop()
            self._service.join()

    @override
    async def on_tick(self, counter: int) -> bool:
        """Also end silent clients, and stop when the service has failed."""
        if counter % TICKS == 0:
            self._service.end_silent()
        return await super().on_tick(counter) or self._service.is_stopping

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()  # whoever waits for a result gets one before the connections end
        await super().shutdown(sockets)
