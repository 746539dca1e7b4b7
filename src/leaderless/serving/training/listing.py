"""Endpoints that list what there is: models, clients, adapters and saved states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from leaderless.base.values import Json
from leaderless.serving.http_server import ApiError, read_body
from leaderless.serving.training.requests import PathQuestion, read_request
from leaderless.serving.training.saved_states import (
    SCHEME,
    NoStateError,
    SavedState,
    StateFolder,
    TrainedRun,
    written_time,
)
from leaderless.serving.training.service import TRAIN, TrainingService

Entry = TypeVar("Entry")
MOST = 1000
"""Most entries of a list at a time."""


class Listing:
    """Answers requests that change nothing, except for the removal of states."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    @property
    def _states(self) -> StateFolder:
        return self._service.states

    async def capabilities(self, request: Request) -> Response:  # noqa: ARG002
        """What this server trains."""
        model = self._service.model
        only = {
            "model_name": model.name,
            "max_context_length": model.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [only]})

    async def sampler(self, request: Request) -> Response:
        """A sampler."""
        sampler_id = request.path_params["sampler_id"]
        _, found = self._service.sampler(sampler_id)
        name = self._service.model.name
        return JSONResponse({"sampler_id": sampler_id, "base_model": name, "model_path": found.path})

    async def runs(self, request: Request) -> Response:
        """All adapters that any client has had."""
        shown, cursor = _page(request, self._states.runs())
        return JSONResponse({"training_runs": [self._run(run) for run in shown], "cursor": cursor})

    async def run(self, request: Request) -> Response:
        """Adapters of a client."""
        return JSONResponse(self._run(self._known(request)))

    def _known(self, request: Request) -> TrainedRun:
        run_id = request.path_params["run_id"]
        if (run := self._states.run(run_id)) is None:
            raise ApiError(404, f"training run '{run_id}' is not known here")
        return run

    def _run(self, run: TrainedRun) -> dict[str, Json]:
        states = self._states.states(run.run_id)
        newest = {
            kind: next((one for one in states if one.kind == kind), None) for kind in ("weights", "sampler_weights")
        }
        last = {kind: None if one is None else one.to_json() for kind, one in newest.items()}
        return {
            "training_run_id": run.run_id,
            "base_model": run.base_model,
            "model_owner": run.run_id.partition(":")[0],
            "is_lora": True,
            "lora_rank": run.shape.rank,
            "last_request_time": written_time(max([run.created, *(one.saved for one in states)])),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": dict(run.user_metadata),
        }

    async def states(self, request: Request) -> Response:
        """Saved states of some adapters."""
        found = self._states.states(self._known(request).run_id)
        return JSONResponse({"checkpoints": [one.to_json() for one in found]})

    async def all_states(self, request: Request) -> Response:
        """All saved states."""
        found = [state for run in self._states.runs() for state in self._states.states(run.run_id)]
        shown, cursor = _page(request, sorted(found, key=lambda state: state.saved, reverse=True))
        return JSONResponse({"checkpoints": [one.to_json() for one in shown], "cursor": cursor})

    async def remove(self, request: Request) -> Response:
        """Remove a saved state."""
        path = SCHEME + "/".join(request.path_params[name] for name in ("run_id", "kind", "name"))
        self._states.remove(self._found(path))
        return JSONResponse({})

    def _found(self, path: str) -> SavedState:
        try:
            return self._states.find(path)
        except NoStateError as error:
            raise ApiError(404, str(error)) from error

    async def weights_info(self, request: Request) -> Response:
        """What the adapters of a saved state are."""
        state = self._found(read_request(await read_body(request), PathQuestion).tinker_path)
        run = self._states.run(state.run_id)
        if run is None:
            raise ApiError(404, f"training run '{state.run_id}' is not known here")
        return JSONResponse(
            {
                "base_model": run.base_model,
                "is_lora": True,
                "lora_rank": run.shape.rank,
                "train_unembed": False,
                "train_mlp": run.shape.others,
                "train_attn": run.shape.attention,
            }
        )

    async def sessions(self, request: Request) -> Response:
        """The clients that are there."""
        shown, _ = _page(request, [one.session_id for one in self._service.sessions()])
        return JSONResponse({"sessions": [*shown]})

    async def session(self, request: Request) -> Response:
        """A client."""
        found = self._service.session(request.path_params["session_id"])
        names = [*found.lanes]
        return JSONResponse(
            {
                "training_run_ids": [name for name in names if TRAIN in name],
                "sampler_ids": [name for name in names if TRAIN not in name],
                "user_metadata": {name: str(value) for name, value in found.user_metadata.items()},
                "display_name": found.display_name,
            }
        )


def _page(request: Request, entries: Sequence[Entry]) -> tuple[Sequence[Entry], dict[str, Json]]:
    """The part of a list that a client asks for, and which part it is."""
    try:
        limit, offset = (int(request.query_params.get(name, given)) for name, given in (("limit", 20), ("offset", 0)))
    except ValueError as error:
        raise ApiError(400, "limit and offset must be whole numbers") from error
    if not 0 < limit <= MOST or offset < 0:
        raise ApiError(400, f"limit={limit} must be 1 to {MOST}, and offset={offset} at least 0")
    return entries[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(entries)}
