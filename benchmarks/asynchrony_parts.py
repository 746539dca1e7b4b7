"""An engine and a training back end that take the time of their tokens, and an environment, for `asynchrony.py`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from random import Random

from leaderless import EngineSetup, Environment, RolloutSetup, Turn, rollout_engine, train_backend
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import load_causal_lm
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams
from leaderless.training.engine import UpdateInfo
from leaderless.training.forward_passes import Passes
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.weight_sharding import WeightSharding

STEP_S, SEQUENCE_S = float(os.environ.get("STEP_S", "0.005")), float(os.environ.get("SEQUENCE_S", "0.00002"))
"""Seconds of a token of all sequences, and more for each of them."""
SCORE_S, UPDATE_S = float(os.environ.get("SCORE_S", "0.00009")), float(os.environ.get("UPDATE_S", "0.00028"))
"""Seconds in which a rank scores a token, and trains on one."""
MEDIAN_TOKENS, SIGMA = float(os.environ.get("MEDIAN_TOKENS", "60")), float(os.environ.get("SIGMA", "1.1"))
"""Median length of a response, and the spread of its logarithm."""
DELAY_S = 0.5
"""Median time of an answer of the environment."""


@dataclass
class _Sequence:
    request: int
    sibling: int
    sample_id: int
    num_left: int
    num_made: int


class TokenEngine:
    """Samples tokens that depend on the sample alone, one for each sequence in a step."""

    def __init__(self, setup: RolloutSetup) -> None:
        self.policy_version: int | None = None
        self._max_sequences = setup.rollout.max_sequences
        self._num_requests = 0
        self._sequences: list[_Sequence] = []
        self._deltas: list[Delta] = []

    def wake(self, reload: Callable[[], None]) -> None:
        """It needs nothing."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        for _ in weights:
            pass
        self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:  # noqa: ARG002
        self._sequences.clear()
        self._deltas.clear()

    def close(self) -> None:
        self._sequences.clear()

    def submit(self, request: Request, params: SamplingParams) -> int:
        self._num_requests += 1
        begun = request.begun or [Completion() for _ in request.sample_ids]
        for sibling, sample_id in enumerate(request.sample_ids):
            made = len(begun[sibling].tokens)
            length = min(params.max_tokens, max(1, int(Random(sample_id).lognormvariate(log(MEDIAN_TOKENS), SIGMA))))
            self._sequences.append(_Sequence(self._num_requests, sibling, sample_id, max(1, length - made), made))
        return self._num_requests

    def forget(self, conversation: int) -> None:
        pass

    def abort(self, request: int) -> None:
        for one in [one for one in self._sequences if one.request == request]:
            self._sequences.remove(one)
            self._deltas.append(Delta(request, one.sibling, (), (), "aborted"))

    def step(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        active = self._sequences[: self._max_sequences]
        if active:
            time.sleep(STEP_S + SEQUENCE_S * len(active))
        for one in active:
            one.num_left -= 1
            one.num_made += 1
            token = 1 + Random(one.sample_id * 1024 + one.num_made).randrange(30)
            reason = None if one.num_left else "stop"
            deltas.append(Delta(one.request, one.sibling, [token], [-3.0], reason, self.policy_version))
        self._sequences = [one for one in self._sequences if one.num_left]
        return deltas


@rollout_engine(updates=("keep",))
def make_engine(setup: RolloutSetup) -> TokenEngine:
    return TokenEngine(setup)


class TokenTrainer(FsdpEngine):
    """Trains a tiny model, and takes as long as its tokens take a larger one."""

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
        self._begin, self._due_s = 0.0, 0.0

    def log_probs(self, batch: Batch) -> Jagged:
        begin = time.monotonic()
        made = super().log_probs(batch)
        _sleep_until(begin + SCORE_S * len(made.values))
        return made

    def passes(self, batch: Batch) -> Passes:
        self._begin, self._due_s = time.monotonic(), UPDATE_S * len(batch.jagged("tokens").values)
        return super().passes(batch)

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        info = super().optimizer_step(allow)
        _sleep_until(self._begin + self._due_s)
        return info


def _sleep_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))


@train_backend(shards_weights=True)
def make_trainer(setup: EngineSetup) -> TokenTrainer:
    return TokenTrainer(setup)


class Tools(Environment):
    """Answers three times, after delays with a heavy tail."""

    async def reset(self, task: object, rng: Random) -> str:  # noqa: ARG002
        self.rng, self.turn = rng, 0
        return "go"

    async def act(self, text: str) -> Turn:
        await asyncio.sleep(min(5.0, self.rng.lognormvariate(log(DELAY_S), 0.8)))
        self.turn += 1
        return Turn("on", reward=float(len(text) % 2), done=self.turn == 3)
