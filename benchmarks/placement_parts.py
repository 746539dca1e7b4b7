"""An engine and a training back end that take the time of a token model, for `placement.py`.

What they take is written in `work.json` of the working directory; the planner never sees it.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from leaderless import EngineSetup, RolloutSetup, rollout_engine, train_backend
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.value_model import load_value_model
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.training.forward_passes import BoundedPasses, Passes
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.training.weight_sharding import WeightSharding

SCORING = 0.3
"""Seconds of a pass that only scores, as a share of those of an update."""


class Work(TypedDict):
    """What a workload takes.

    Attributes:
        median: Median tokens of a response.
        sigma: Standard deviation of the logarithm of its length.
        most: Most tokens.
        token_s: Seconds of a decoding step with one sequence; each further one adds a tenth.
        delay_s: Seconds after its last token in which an environment answers, and a sequence keeps its place.
        places: Sequences that an engine decodes at the same time.
        train_fixed_s: Seconds of an update, whatever it trains on.
        train_token_s: Seconds of an update per token of a rank.
    """

    median: float
    sigma: float
    most: int
    token_s: float
    delay_s: float
    places: int
    train_fixed_s: float
    train_token_s: float


def work() -> Work:
    found: Work = json.loads(Path("work.json").read_text(encoding="utf-8"))
    return found


def length_of(sample_id: int, work: Work) -> int:
    """Tokens of a response, which depend on the sample alone."""
    drawn = random.Random(sample_id).lognormvariate(math.log(work["median"]), work["sigma"])
    return max(1, min(work["most"], round(drawn)))


def generation_seconds(lengths: Sequence[int], work: Work) -> float:
    """Seconds until the last response has ended; a free place takes the next one."""
    crowd = min(len(lengths), work["places"])
    step_s = work["token_s"] * (1 + (crowd - 1) / 10)
    free = [0.0] * work["places"]
    for length in lengths:
        heapq.heapreplace(free, free[0] + length * step_s + work["delay_s"])
    return max(free)


class PacedEngine:
    """Generates tokens that depend on the sample alone, all at once when they have taken their time."""

    def __init__(self, setup: RolloutSetup) -> None:  # noqa: ARG002
        self.policy_version: int | None = None
        self._work, self._begin, self._num_requests = work(), 0.0, 0
        self._open: dict[int, tuple[Request, SamplingParams]] = {}

    def wake(self, reload: Callable[[], None]) -> None:
        """It needs nothing."""

    def load_weights(self, weights: WeightStream) -> None:
        for _ in weights:
            pass
        self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:  # noqa: ARG002
        self._open.clear()

    def close(self) -> None:
        self._open.clear()

    def submit(self, request: Request, params: SamplingParams) -> int:
        if not self._open:
            self._begin = time.monotonic()
        self._num_requests += 1
        self._open[self._num_requests] = request, params
        return self._num_requests

    def forget(self, conversation: int) -> None:
        pass

    def abort(self, request: int) -> None:
        self._open.pop(request, None)

    def step(self) -> list[Delta]:
        samples = [
            (number, sibling, length_of(sample_id, self._work), sample_id)
            for number, (request, _) in self._open.items()
            for sibling, sample_id in enumerate(request.sample_ids)
        ]
        if not samples:
            return []
        sleep_until(self._begin + generation_seconds([length for _, _, length, _ in samples], self._work))
        deltas = [
            Delta(number, sibling, [1 + sample_id % 30] * length, [-3.0] * length, "length", self.policy_version)
            for number, sibling, length, sample_id in samples
        ]
        self._open.clear()
        return deltas


def sleep_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))


class Paced(BoundedPasses):
    """Passes that take as long as the tokens ask for; scoring takes a share of that."""

    share, due = 1.0, 0.0

    def passes(self, batch: Batch) -> Passes:
        found, num_tokens = work(), int(batch.jagged("response_mask").values.sum())
        self.due = time.monotonic() + self.share * (found["train_fixed_s"] + found["train_token_s"] * num_tokens)
        return super().passes(batch)

    def end_passes(self, *, is_done: bool) -> None:
        super().end_passes(is_done=is_done)
        sleep_until(self.due)


class PacedTrainer(Paced, FsdpEngine):
    """Trains a tiny model, and takes its time."""

    def log_probs(self, batch: Batch) -> Jagged:
        self.share = SCORING
        try:
            return super().log_probs(batch)
        finally:
            self.share = 1.0


class PacedCritic(Paced, FsdpValueEngine):
    """Trains a tiny value model, and takes its time."""

    def values(self, batch: Batch) -> Jagged:
        self.share = SCORING
        try:
            return super().values(batch)
        finally:
            self.share = 1.0


@rollout_engine()
def make_engine(setup: RolloutSetup) -> PacedEngine:
    return PacedEngine(setup)


@train_backend(values=True, shards_weights=True)
def make_trainer(setup: EngineSetup) -> PacedTrainer | PacedCritic:
    where = setup.model, setup.process_group, setup.device, setup.micro_batch_tokens
    mesh = setup.mesh() if setup.process_group.size > 1 else None
    if setup.is_critic:
        critic = load_value_model(setup.model, setup.role)
        return PacedCritic(
            critic, *where, optimizer=setup.optimizer, num_updates=setup.num_updates, division=WeightSharding(mesh)
        )
    model = load_causal_lm(setup.model, setup.role)
    return PacedTrainer(
        model, *where, optimizer=setup.optimizer, num_updates=setup.num_updates, division=WeightSharding(mesh)
    )
