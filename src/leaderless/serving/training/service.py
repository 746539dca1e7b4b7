"""What clients ask of the training service, in the thread of its event loop; one other thread computes."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from uuid import uuid4

from leaderless.serving.http_server import STOPPING, ApiError
from leaderless.serving.training.adapters import AdaptedModel, AdapterShape, Weights
from leaderless.serving.training.drawing import drawing_of
from leaderless.serving.training.promises import ClientSession
from leaderless.serving.training.requests import (
    LoadRequest,
    NewModel,
    NewSampler,
    NewSession,
    SampleRequest,
    SamplerRequest,
    SaveRequest,
    StepRequest,
    WantedAdapters,
)
from leaderless.serving.training.sampling import SampleJob, SampleLane
from leaderless.serving.training.saved_states import Kind, NoStateError, SavedState, StateFolder, TrainedRun
from leaderless.serving.training.tenant import AdamSettings, Tenant
from leaderless.serving.training.turns import Failure, FairQueue, Promise, TrainLane, Work
from leaderless.serving.training.wire import PassRequest, write_pass_result

TRAIN, SAMPLE = ":train:", ":sample:"
"""Parts of the names of adapters and samplers, after the name of their client."""
SAMPLERS = 32
"""Most samplers of a client; the one that was used least recently is released for a further one."""
IDLE_S = 0.5
"""Time after which the thread that computes looks around, if nothing wakes it."""


@dataclass(frozen=True)
class ClientLimits:
    """What clients may use.

    Attributes:
        max_tenants: Adapters that are trained at the same time.
        max_waiting: Requests of a client that have not ended.
        silence_s: Time after which a client that shows no sign of life has ended.
    """

    max_tenants: int = 16
    max_waiting: int = 1024
    silence_s: float = 120.0


@dataclass(eq=False)
class _Sampler:
    """A sampler as clients know it."""

    lane: SampleLane
    path: str | None
    num_clients: int = 1


class TrainingService:
    """Clients with adapters on one model. Requests are taken in an event loop, and carried out in one thread."""

    def __init__(self, model: AdaptedModel, states: StateFolder, limits: ClientLimits) -> None:
        """Begin without clients."""
        self.model, self.states, self.limits = model, states, limits
        self.queue = FairQueue()
        self.failure: BaseException | None = None
        """Error that ended the thread, if any."""
        self.is_stopping = False
        """Whether requests are no longer taken."""
        self._sessions: dict[str, ClientSession] = {}
        self._tenants: dict[str, Tenant] = {}
        self._runs: dict[str, TrainedRun] = {}
        self._samplers: dict[str, _Sampler] = {}
        self._thread = threading.Thread(target=self._compute, name="training", daemon=True)

    def start(self) -> None:
        """Start the thread that computes."""
        self._thread.start()

    def stop(self) -> None:
        """Settle all requests, and end the thread."""
        self.is_stopping = True
        for session_id in [*self._sessions]:
            self.end_session(session_id, Failure(STOPPING, is_users=False))
        self.queue.order(lambda: None)

    def join(self) -> None:
        """Wait for the end of the thread, and raise the error that ended it, if any."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _compute(self) -> None:
        try:
            while not self.is_stopping:
                if not self.queue.turn():
                    self.queue.wait(IDLE_S)
            self.queue.turn()  # the orders of the end
        except BaseException as failure:  # noqa: BLE001 - the end of the thread; `join` raises it
            self.failure, self.is_stopping = failure, True

    def news(self) -> str:
        """Describe who is there; empty without clients."""
        if not self._sessions:
            return ""
        return (
            f"{len(self._sessions)} clients, {len(self._tenants)} adapters in training, {len(self._samplers)} samplers"
        )

    # Clients

    def new_session(self, wanted: NewSession) -> str:
        """Take a client; returns its name."""
        if self.is_stopping:
            raise ApiError(503, STOPPING)
        session = ClientSession(
            str(uuid4()), self.limits.max_waiting, wanted.user_metadata or {}, display_name=wanted.display_name
        )
        self._sessions[session.session_id] = session
        return session.session_id

    def session(self, name: str) -> ClientSession:
        """The client with a name, or to which adapters, samplers and requests with a name belong."""
        session_id = name.partition(":")[0]
        if session_id not in self._sessions:
            raise ApiError(404, self._why_unknown(name))
        return self._sessions[session_id]

    def _why_unknown(self, name: str) -> str:
        run_id = ":".join(name.split(":")[:3])
        saved = self.states.states(run_id) if TRAIN in run_id and self.states.run(run_id) is not None else []
        hint = f"; the newest state that was saved is {saved[0].path}" if saved else ""
        return (
            f"'{name}' is of a client that this server does not know: it has ended, was silent for "
            f"{self.limits.silence_s:g} s, or was there before the server was started again{hint}: "
            "create a new client, and load a saved state"
        )

    def sessions(self) -> list[ClientSession]:
        """All clients."""
        return [*self._sessions.values()]

    def end_silent(self) -> None:
        """End clients that have shown no sign of life for too long."""
        now = time.monotonic()
        for session in self.sessions():
            if now - session.last_seen > self.limits.silence_s:
                text = f"the client was silent for {self.limits.silence_s:g} s"
                self.end_session(session.session_id, Failure(text, is_users=True))

    def end_session(self, session_id: str, failure: Failure) -> None:
        """Release what a client has; only what it has saved remains."""
        session = self._sessions.pop(session_id)
        for name in [*session.lanes]:
            self._drop(session, name, failure)

    def _drop(self, session: ClientSession, name: str, failure: Failure) -> None:
        lane = session.lanes.pop(name)

        def end() -> None:
            lane.end(failure)
            self.queue.remove(session.session_id, lane)
            self._tenants.pop(name, None)

        self._samplers.pop(name, None)
        self._runs.pop(name, None)
        self.queue.order(end)

    # Adapters

    def new_model(self, wanted: NewModel) -> Promise:
        """Take new adapters."""
        self._check_base(wanted.base_model)
        shape = _shape(wanted.lora_config)
        text = wanted.model_dump_json()
        return self._new_lane(wanted.session_id, wanted.model_seq_id, shape, wanted.user_metadata, text, self._create)

    def _create(self, run: TrainedRun, seed: int | None) -> Work:
        self._tenants[run.run_id] = Tenant(self.model, run.shape, seed)
        self.states.add_run(run)
        yield
        return {"model_id": run.run_id, "type": "create_model"}

    def _new_lane(
        self,
        session_id: str,
        number: int,
        shape: AdapterShape,
        metadata: Mapping[str, object] | None,
        text: str,
        work: Callable[[TrainedRun, int | None], Work],
        seed: int | None = None,
    ) -> Promise:
        session = self.session(session_id)
        run_id = f"{session_id}{TRAIN}{number}"
        texts = {name: str(value) for name, value in (metadata or {}).items()}
        run = TrainedRun(run_id, self.model.name, shape, texts, time.time())

        def begin(promise: Promise) -> None:
            lane = TrainLane(next_seq=0)
            session.lanes[run_id], self._runs[run_id] = lane, run

            def add() -> None:
                self.queue.add(session_id, lane)
                lane.push(0, promise, lambda: work(run, seed))

            self.queue.order(add)

        if run_id not in self._runs and len(self._runs) >= self.limits.max_tenants:
            raise ApiError(
                400,
                f"{len(self._runs)} adapters are being trained, as many as this server takes: end a client, or start "
                "the server with a higher --max-tenants",
            )
        return session.ask(f"{run_id}:0", _digest(text), len(text), begin)

    def _check_base(self, name: str | None) -> None:
        if name not in {None, self.model.name, self.model.config.path}:
            raise ApiError(400, f"base_model='{name}' is not served here: ask for '{self.model.name}'", "base_model")

    def run(self, model_id: str) -> TrainedRun:
        """Adapters that are being trained."""
        self.session(model_id).see()
        if model_id not in self._runs:
            raise ApiError(404, f"'{model_id}' has not been created by this client")
        return self._runs[model_id]

    def do(self, model_id: str, seq: int, digest: str, num_bytes: int, work: Callable[[Tenant], Work]) -> Promise:
        """Take a request for adapters, the one with a number."""
        self.run(model_id)
        session = self.session(model_id)
        lane = cast("TrainLane", session.lanes[model_id])

        def begun() -> Work:
            tenant = self._tenants.get(model_id)
            if tenant is None:
                raise ValueError(f"'{model_id}' could not be created, so nothing can be done with it")
            return work(tenant)

        def begin(promise: Promise) -> None:
            self.queue.order(lambda: lane.push(seq, promise, begun))

        name = f"{model_id}:{seq}"
        if seq < lane.next_seq and not session.knows(name):
            raise ApiError(410, f"request {name} was carried out long ago, and its result is not kept any more")
        return session.ask(name, digest, num_bytes, begin, is_due=seq == lane.next_seq)

    def do_passes(self, request: PassRequest, num_bytes: int) -> Promise:
        """Take a request for passes."""

        def work(tenant: Tenant) -> Work:
            return write_pass_result((yield from tenant.passes(request)))

        return self.do(request.model_id, request.seq_id, request.digest, num_bytes, work)

    def do_step(self, request: StepRequest) -> Promise:
        """Take a request for a step of the optimizer."""

        def work(tenant: Tenant) -> Work:
            metrics = tenant.step(AdamSettings(**request.adam_params.model_dump()))
            yield
            return {"metrics": dict(metrics)}

        return self._do(request.model_id, request.seq_id, request.model_dump_json(), work)

    def _do(self, model_id: str, seq: int, text: str, work: Callable[[Tenant], Work]) -> Promise:
        return self.do(model_id, seq, _digest(text), len(text), work)

    def refuse(self, model_id: str, seq: int, error: ApiError) -> Promise:
        """Use up the number of a request that cannot be read, so that those after it are not held up."""

        def work(tenant: Tenant) -> Work:  # noqa: ARG001
            yield
            raise ValueError(error.message)

        return self._do(model_id, seq, error.message, work)

    def do_save(self, request: SaveRequest) -> Promise:
        """Take a request to save adapters and optimizer."""
        name = request.path or f"step-{request.seq_id}"

        def work(tenant: Tenant) -> Work:
            self.states.check_name(request.model_id, "weights", name, overwrite=request.overwrite)
            yield
            state = self._saved(request, "weights", name, tenant)
            return {"path": state.path, "type": "save_weights"}

        return self._do(request.model_id, request.seq_id, request.model_dump_json(), work)

    def _saved(self, request: SaveRequest | SamplerRequest, kind: Kind, name: str, tenant: Tenant) -> SavedState:
        now = time.time()
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        metadata = request.user_metadata
        wanted = SavedState(request.model_id, kind, name, "", tenant.num_steps, {}, 0, now, expires, metadata)
        optimizer = tenant.optimizer() if kind == "weights" else {}
        return self.states.save(wanted, self.model.adapted(tenant.shape), tenant.weights(), optimizer)

    def do_save_for_sampler(self, request: SamplerRequest) -> Promise:
        """Take a request for a sampler, or to save adapters for later ones."""
        if (request.path is None) == (request.sampling_session_seq_id is None):
            raise ApiError(400, "give either path or sampling_session_seq_id", "path")
        session, loop = self.session(request.model_id), asyncio.get_running_loop()

        def work(tenant: Tenant) -> Work:
            if request.path is not None:
                self.states.check_name(request.model_id, "sampler_weights", request.path, overwrite=False)
                yield
                state = self._saved(request, "sampler_weights", request.path, tenant)
                return {"path": state.path, "type": "save_weights_for_sampler"}
            yield
            sampler_id = f"{session.session_id}{SAMPLE}{request.sampling_session_seq_id}"
            lane = SampleLane(self.model, tenant.shape, tenant.weights())
            # The loop carries this out before it tells the client, in the order of the calls.
            loop.call_soon_threadsafe(self._add_sampler, session, sampler_id, _Sampler(lane, None))
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return self._do(request.model_id, request.seq_id, request.model_dump_json(), work)

    def do_load(self, request: LoadRequest) -> Promise:
        """Take a request to load a saved state, into adapters or into new ones."""
        if request.weights_access_token is not None:
            raise ApiError(400, "weights_access_token: all states of this server belong to its clients: leave it out")
        self._check_base(request.base_model)
        text = request.model_dump_json()
        if request.model_id is not None and request.seq_id is not None and request.session_id is None:
            model_id = request.model_id
            return self._do(model_id, request.seq_id, text, lambda tenant: self._load(request, model_id, tenant))
        if request.session_id is None or request.model_seq_id is None or request.model_id is not None:
            raise ApiError(400, "give either model_id and seq_id, or session_id and model_seq_id", "model_id")
        try:
            shape = self._shape_of(self.states.find(request.path))
        except NoStateError as error:
            raise ApiError(400, str(error), "path") from error
        metadata, number = request.user_metadata, request.model_seq_id

        def work(run: TrainedRun, seed: int | None) -> Work:
            yield from self._create(run, seed)
            return (yield from self._load(request, run.run_id, self._tenants[run.run_id]))

        return self._new_lane(request.session_id, number, shape, metadata, text, work)

    def _shape_of(self, state: SavedState) -> AdapterShape:
        run = self.states.run(state.run_id)
        if run is None or run.base_model != self.model.name:
            base = "nothing" if run is None else f"'{run.base_model}'"
            raise NoStateError(f"path='{state.path}' is of {base}, and '{self.model.name}' is served here")
        return run.shape

    def _load(self, request: LoadRequest, model_id: str, tenant: Tenant) -> Work:
        state = self.states.find(request.path)
        self._shape_of(state)
        weights, optimizer = self.states.load(state)
        if request.optimizer and not optimizer:
            raise NoStateError(f"path='{state.path}' has no optimizer: load its weights alone, or another state")
        yield
        tenant.load(weights, optimizer if request.optimizer else None, state.num_steps)
        return {"path": state.path, "model_id": model_id, "type": "load_weights"}

    # Samplers

    async def new_sampler(self, wanted: NewSampler) -> str:
        """Take a sampler with the model as it is, or with a saved state; returns its name."""
        session = self.session(wanted.session_id)
        session.see()
        self._check_base(wanted.base_model)
        sampler_id = f"{wanted.session_id}{SAMPLE}{wanted.sampling_session_seq_id}"
        if (known := self._samplers.get(sampler_id)) is not None:
            if known.path != wanted.model_path:
                raise ApiError(400, f"sampler {sampler_id} has other weights: does another client use this name?")
            return sampler_id
        if wanted.model_path is None:
            if wanted.base_model is None:
                raise ApiError(400, "give base_model or model_path", "model_path")
            shape, weights = AdapterShape(1), cast("Weights", self.model.base_weights)
        else:
            shape, weights = await asyncio.to_thread(self._stored, wanted.model_path)
        self._add_sampler(session, sampler_id, _Sampler(SampleLane(self.model, shape, weights), wanted.model_path))
        return sampler_id

    def _add_sampler(self, session: ClientSession, sampler_id: str, sampler: _Sampler) -> None:
        if session.session_id not in self._sessions:
            return  # it has ended
        self._samplers[sampler_id] = sampler
        session.lanes[sampler_id] = sampler.lane
        self.queue.order(lambda: self.queue.add(session.session_id, sampler.lane))
        self._release_oldest(session)

    def _stored(self, path: str) -> tuple[AdapterShape, Weights]:
        try:
            state = self.states.find(path)
            return self._shape_of(state), self.states.load(state)[0]
        except NoStateError as error:
            raise ApiError(400, str(error), "model_path") from error

    def _release_oldest(self, session: ClientSession) -> None:
        """Release samplers of a client beyond the most that are kept."""
        own = [name for name in session.lanes if name in self._samplers]
        for name in own[:-SAMPLERS]:
            text = f"sampler {name} was released, since {SAMPLERS} newer ones were used: save its weights by a name"
            self._drop(session, name, Failure(text, is_users=True))

    def sampler(self, sampler_id: str) -> tuple[ClientSession, _Sampler]:
        """A sampler with its client."""
        session = self.session(sampler_id)
        found = self._samplers.get(sampler_id)
        if found is None:
            raise ApiError(
                404, f"there is no sampler '{sampler_id}': it was never made, or released for {SAMPLERS} newer ones"
            )
        session.lanes.move_to_end(sampler_id)
        return session, found

    def do_sample(self, request: SampleRequest, num_bytes: int) -> tuple[Promise, list[str]]:
        """Take a request for samples; returns their names, too."""
        session, sampler = self.sampler(request.sampling_session_id)
        prompt = [token for chunk in request.prompt.chunks for token in chunk.tokens]
        drawing = drawing_of(request, prompt, self.model)

        def begin(promise: Promise) -> None:
            self.queue.order(lambda: sampler.lane.push(SampleJob(promise, prompt, drawing)))

        name = f"{request.sampling_session_id}:{request.seq_id}"
        promise = session.ask(name, _digest(request.model_dump_json()), num_bytes, begin)
        return promise, [f"{name}:{place}" for place in range(request.num_samples)]

    def cancel(self, request_id: str) -> None:
        """Stop sampling for a request; one for training goes on."""
        session = self.session(request_id)
        promise = session.promise(request_id)
        sampler = self._samplers.get(request_id.rpartition(":")[0])
        if promise is not None and sampler is not None:
            self.queue.order(lambda: sampler.lane.cancel(promise))

    def join_sampler(self, sampler_id: str) -> int:
        """Take a further client of a sampler; returns its number."""
        _, found = self.sampler(sampler_id)
        found.num_clients += 1
        return found.num_clients - 1


def _shape(wanted: WantedAdapters) -> AdapterShape:
    if not (wanted.train_attn or wanted.train_mlp):
        raise ApiError(
            400, "adapters of the unembedding alone are not offered: set train_attn or train_mlp", "lora_config"
        )
    return AdapterShape(wanted.rank, wanted.train_attn, wanted.train_mlp)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()
