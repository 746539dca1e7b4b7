"""The back end `megatron` with a stand-in for Megatron in the same process, so that shared ranks can run it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from leaderless import EngineSetup, train_backend
from leaderless.base.values import Json
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.training.megatron.engine import MegatronEngine, settings_of
from leaderless.training.megatron.model import MegatronModel
from leaderless.training.megatron.processes import megatron_rank
from leaderless.training.megatron.server import MegatronCalls

ENVIRONMENT = Path(__file__).parent / "megatron_environment"


class LocalServer:
    """Calls that go through JSON, as over HTTP."""

    def __init__(self, calls: MegatronCalls) -> None:
        self._calls = calls

    def call_numbered(self, path: str, body: Json) -> Json:
        answer = self._calls.answer(path.removeprefix("/"), json.loads(json.dumps(body)))
        return json.loads(json.dumps(answer))

    def close(self) -> None:
        pass


@train_backend(shards_weights=True, axes=("pp", "tp"), divides_experts=True)
def make_engine(setup: EngineSetup) -> MegatronEngine:
    """Load a model in the stand-in; this process has met the others already."""
    if str(ENVIRONMENT) not in sys.path:
        sys.path.append(str(ENVIRONMENT))
    from megatron.core import parallel_state

    parallel_state.PLACES[:] = sorted(setup.layout.ranks, key=partial(megatron_rank, setup.layout))
    model = empty_causal_lm(setup.model, setup.role)
    settings = settings_of(setup, model.vocab_size, "", 60.0)
    return MegatronEngine(setup, model, LocalServer(MegatronCalls(MegatronModel(settings))))
