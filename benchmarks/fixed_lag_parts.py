"""An engine and a training back end of known times, for `fixed_lag.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from leaderless import EngineSetup, RolloutSetup, rollout_engine, train_backend
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import load_causal_lm
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.training.engine import UpdateInfo
from leaderless.training.forward_passes import Passes
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.weight_sharding import WeightSharding


class Pace:
    """Lets each iteration take its time, and notes when it began and ended.

    The times are in the working directory, which all workers share.
    """

    def __init__(self, kind: str, rank: int) -> None:
        self._times: list[float] = json.loads(Path("times.json").read_text(encoding="utf-8"))[kind]
        self._spans = Path(f"spans-{kind}-{rank}.jsonl")
        self._iteration, self._begin = 0, 0.0

    def begin(self) -> None:
        """Begin an iteration, unless it has begun."""
        self._begin = self._begin or time.time()

    def end(self) -> None:
        """End it when it has taken its time, which includes that of what was computed."""
        due = self._begin + self._times[self._iteration]
        time.sleep(max(0.0, due - time.time()))
        with self._spans.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self._iteration, self._begin, time.time()]) + "\n")
        self._iteration, self._begin = self._iteration + 1, 0.0


class PacedEngine:
    """Generates tokens that depend on the sample alone, all at once when the iteration has taken its time."""

    def __init__(self, setup: RolloutSetup) -> None:
        self.policy_version: int | None = None
        self._pace = Pace("generation", setup.rank)
        self._num_requests = 0
        self._open: dict[int, tuple[Request, SamplingParams]] = {}

    def wake(self, reload: Callable[[], None]) -> None:
        """It needs nothing."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        for _ in weights:
            pass
        self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:  # noqa: ARG002
        self._open.clear()

    def close(self) -> None:
        self._open.clear()

    def submit(self, request: Request, params: SamplingParams) -> int:
        self._pace.begin()
        self._num_requests += 1
        self._open[self._num_requests] = request, params
        return self._num_requests

    def forget(self, conversation: int) -> None:
        pass

    def abort(self, request: int) -> None:
        self._open.pop(request, None)

    def step(self) -> list[Delta]:
        if not self._open:
            return []
        self._pace.end()
        deltas = [
            Delta(number, sibling, [1 + sample_id % 30] * count, [-3.0] * count, "length", self.policy_version)
            for number, (request, params) in self._open.items()
            for count in [params.max_tokens]
            for sibling, sample_id in enumerate(request.sample_ids)
        ]
        self._open.clear()
        return deltas


@rollout_engine()
def make_engine(setup: RolloutSetup) -> PacedEngine:
    return PacedEngine(setup)


class PacedTrainer(FsdpEngine):
    """Trains a tiny model, and takes as long as it should for each update."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(
            load_causal_lm(setup.model, setup.role),
            setup.model,
            setup.process_group,
            setup.device,
            setup.micro_batch_tokens,
            optimizer=setup.optimizer,
            num_updates=setup.num_updates,
            division=WeightSharding(setup.mesh() if setup.process_group.size > 1 else None),
        )
        self._pace = Pace("training", setup.process_group.rank)

    def log_probs(self, batch: Batch) -> Jagged:
        self._pace.begin()
        return super().log_probs(batch)

    def passes(self, batch: Batch) -> Passes:
        self._pace.begin()
        return super().passes(batch)

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        info = super().optimizer_step(allow)
        self._pace.end()
        return info


@train_backend(shards_weights=True)
def make_trainer(setup: EngineSetup) -> PacedTrainer:
    return PacedTrainer(setup)
