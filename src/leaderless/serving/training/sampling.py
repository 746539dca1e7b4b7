"""Samplers: adapters as they were at some time, with which responses are sampled and prompts scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from leaderless.rollout.engine import Delta, Request
from leaderless.rollout.native.engine import NativeEngine
from leaderless.serving.training.adapters import AdaptedModel, AdapterShape, Weights, packed
from leaderless.serving.training.drawing import Drawing
from leaderless.serving.training.turns import Failure, Promise
from leaderless.serving.training.wire import SampledSequence, write_samples


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request for samples.

    Attributes:
        promise: Its result.
        prompt: Token ids.
        drawing: Samples to draw, and their distribution.
    """

    promise: Promise
    prompt: Sequence[int]
    drawing: Drawing


@dataclass(eq=False)
class _Running:
    """A request in the engine."""

    job: SampleJob
    samples: list[SampledSequence]
    num_left: int
    prompt_log_probs: list[float] | None


@dataclass(eq=False)
class SampleLane:
    """Requests for samples of the same adapters, which are sampled together.

    Attributes:
        model: Shared model.
        shape: Shape of the adapters.
        weights: The adapters.
    """

    model: AdaptedModel
    shape: AdapterShape
    weights: Weights
    _pending: deque[SampleJob] = field(default_factory=deque)
    _engine: NativeEngine | None = None
    _running: dict[int, tuple[_Running, int]] = field(default_factory=dict)
    _failure: Failure | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not ended."""
        return len(self._pending) + len({id(one) for one, _ in self._running.values()})

    def push(self, job: SampleJob) -> None:
        """Add a request."""
        if self._failure is not None:
            job.promise.settle(self._failure)
            return
        self._pending.append(job)

    def is_ready(self) -> bool:
        """Whether any response is not at its end."""
        return bool(self._pending or self._running)

    def advance(self) -> None:
        """Score the prompt of a request, or draw a token of each response."""
        try:
            if self._pending and self._pending[0].drawing.scores_prompt:
                self._begin(self._pending.popleft())
                return
            while self._pending and not self._pending[0].drawing.scores_prompt:
                self._begin(self._pending.popleft())
            if self._engine is not None:
                for delta in self._engine.step():
                    self._take(delta)
        except Exception as error:  # noqa: BLE001 - whatever it is, the clients get it, and others go on
            self._fail(Failure.of(error))
        self._rest()

    def _begin(self, job: SampleJob) -> None:
        """Score the prompt of a request, and have the engine sample its responses."""
        try:
            scores = None if not job.drawing.scores_prompt else self._scores(job)
            if self._engine is None:
                self._engine = self.model.engine(self.shape, self.weights)
            running = _Running(
                job, [SampledSequence() for _ in job.drawing.sample_ids], len(job.drawing.sample_ids), scores
            )
            for place, sample_id in enumerate(job.drawing.sample_ids):
                # Each is a request of its own, so that one can end before the others; equal prompts are read once.
                number = self._engine.submit(Request(job.prompt, [sample_id]), job.drawing.params)
                self._running[number] = running, place
        except Exception as error:  # noqa: BLE001 - only this request has failed
            job.promise.settle(Failure.of(error))

    @torch.no_grad()
    def _scores(self, job: SampleJob) -> list[float]:
        """The log-probability of each token of a prompt after those before it; NaN where there is none."""
        prompt, last = job.prompt, job.drawing.num_scored
        tokens = torch.tensor(prompt)
        found = [float("nan")] * len(prompt)
        if len(prompt) > 1:
            batch = packed([tokens[:-1]], [tokens[1:]])
            found[1:] = self.model.scorer(self.shape, self.weights).forward(batch, "none").log_probs.tolist()
        first = 0 if last is None else len(prompt) - last
        return [float("nan")] * first + found[first:]

    def _take(self, delta: Delta) -> None:
        """Add what a step has drawn."""
        if delta.request not in self._running:
            return  # it has ended before
        running, place = self._running[delta.request]
        sample, ends = running.samples[place], running.job.drawing.ends
        for token, log_prob in zip(delta.tokens, delta.log_probs, strict=True):
            sample.tokens.append(token)
            sample.log_probs.append(log_prob)
            if token in ends:
                sample.has_stopped = True
                break
        sample.has_stopped |= delta.finish_reason == "stop"
        if not sample.has_stopped and delta.finish_reason is None:
            return
        del self._running[delta.request]
        if delta.finish_reason is None and self._engine is not None:
            self._engine.abort(delta.request)
        running.num_left -= 1
        if not running.num_left:
            running.job.promise.settle(write_samples(running.samples, running.prompt_log_probs))

    def cancel(self, promise: Promise) -> None:
        """Stop sampling for a request."""
        failure = Failure("the client has canceled the request", is_users=True)
        self._pending = deque(job for job in self._pending if job.promise is not promise)
        for number in [number for number, (one, _) in self._running.items() if one.job.promise is promise]:
            del self._running[number]
            if self._engine is not None:
                self._engine.abort(number)
        promise.settle(failure)
        self._rest()

    def _rest(self) -> None:
        """Give the engine back if it has nothing to do."""
        if self._engine is not None and not self._running and not self._pending:
            engine, self._engine = self._engine, None
            self.model.give_back(self.shape, engine)

    def _fail(self, failure: Failure) -> None:
        """Settle what is being sampled with a failure."""
        engine = self._engine
        for number, (running, _) in [*self._running.items()]:
            if engine is not None:
                engine.abort(number)
            running.job.promise.settle(failure)
        self._running.clear()

    def end(self, failure: Failure) -> None:
        """Settle all requests with a failure."""
        self._failure = failure
        self._fail(failure)
        for job in self._pending:
            job.promise.settle(failure)
        self._pending.clear()
        self._rest()
