"""An engine whose responses a test determines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams


class ScriptedServing:
    """See `Serving`."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.policy_version = engine, 0

    @contextmanager
    def phase(self) -> Iterator[RolloutEngine]:
        self.engine.threads.add(threading.current_thread().name)
        self.engine.start()
        yield self.engine

    def close(self) -> None:
        self.engine.close()


def raising(error: Exception) -> Callable[[], None]:
    """A function that raises an error whenever it is called."""

    def fail() -> None:
        raise error

    return fail


class ScriptedEngine:
    """Gives each response token 1 in each step, and ends it at its longest length."""

    def __init__(self) -> None:
        self.under_way: dict[int, tuple[Request, SamplingParams, int]] = {}
        self.may_step = threading.Event()
        """Event that a step waits for."""
        self.may_step.set()
        self.in_step = threading.Event()
        """Event that a step sets when it begins."""
        self.before_step: Callable[[], object] = lambda: None
        """Function called in each step; may raise."""
        self.start: Callable[[], object] = lambda: None
        """Function called before anything is served; may raise."""
        self.num_steps = 0
        self.aborted: list[int] = []
        self.threads: set[str] = set()
        self.policy_version: int | None = 0
        self._deltas: list[Delta] = []
        self._number = 0

    def wake(self, reload: Callable[[], None]) -> None:
        """It needs nothing."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        """It has no weights."""

    def sleep(self, *, keep_weights: bool) -> None:
        """It holds nothing."""

    def submit(self, request: Request, params: SamplingParams) -> int:
        self.threads.add(threading.current_thread().name)
        self._number += 1
        self.under_way[self._number] = (request, params, 0)
        return self._number

    def step(self) -> list[Delta]:
        self.in_step.set()
        assert self.may_step.wait(10)
        self.before_step()
        self.num_steps += 1
        for number, (request, params, count) in list(self.under_way.items()):
            reason = "length" if count + 1 == params.max_tokens else None
            self._deltas += [Delta(number, i, (1,), (-0.5,), reason, 0) for i in range(len(request.sample_ids))]  # type: ignore[arg-type]
            self.under_way[number] = (request, params, count + 1)
            if reason:
                del self.under_way[number]
        deltas, self._deltas = self._deltas, []
        return deltas

    def forget(self, conversation: int) -> None:
        pass

    def abort(self, request: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.aborted.append(request)
        gone = self.under_way.pop(request, None)
        if gone is not None:
            self._deltas += [Delta(request, i, (), (), "aborted") for i in range(len(gone[0].sample_ids))]

    def close(self) -> None:
        self.under_way.clear()


class TalkingEngine(ScriptedEngine):
    """Says what a function makes of the prompt's tokens, one token in each step."""

    def __init__(self, say: Callable[[list[int]], list[int]], end: int) -> None:
        super().__init__()
        self._say, self._end = say, end

    def step(self) -> list[Delta]:
        self.in_step.set()
        assert self.may_step.wait(10)
        self.before_step()
        self.num_steps += 1
        for number, (request, params, count) in list(self.under_way.items()):
            said = [*self._say([*request.prompt]), self._end]
            tokens = said[count : count + 1]
            stopped = self._stops(said[: count + 1], params.stop)
            reason = "stop" if count + 1 == len(said) or stopped else None
            reason = reason or ("length" if count + 1 == params.max_tokens else None)
            for sibling in range(len(request.sample_ids)):
                self._deltas.append(Delta(number, sibling, tuple(tokens), (-0.5,), reason, 0))  # type: ignore[arg-type]
            self.under_way[number] = (request, params, count + 1)
            if reason:
                del self.under_way[number]
        deltas, self._deltas = self._deltas, []
        return deltas

    def _stops(self, said: list[int], stop: tuple[str, ...]) -> bool:
        return any(text in self.decode(said) for text in stop)

    decode: Callable[[list[int]], str]
    """Function that writes tokens as text."""
