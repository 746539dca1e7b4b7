"""Chunks of responses go to reward processes, outcomes come back, whatever the rewards do. Imports no torch."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from pebble import ProcessExpired, ProcessPool

from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.child import CHUNK_S, LoadFailure, Outcome, describe, grade_chunk, initialize, timed_out
from leaderless.rewards.protocol import RewardInput
from leaderless.rewards.spawn import RewardContext

START_TIMEOUT_S = 300.0
"""Seconds reward processes may take to start and to import the user's modules."""
MAX_CHUNK_SIZE = 64
_MAX_BREAKDOWNS = 3
_NOTICE_S = 1.0
"""How often a wait looks whether the processes still are there."""


@dataclass(frozen=True)
class Chunk:
    """Responses that one reward grades one after another.

    Attributes:
        reward: Its name.
        indices: Of the responses among all.
        is_suspect: Its only response was being graded when a process ended: it is the culprit if that happens again.
    """

    reward: str
    indices: tuple[int, ...]
    is_suspect: bool = False


_Future = Future[list[Outcome] | LoadFailure]


@dataclass
class _Job:
    """One call of `run` on its way."""

    samples: Sequence[RewardInput]
    waiting: deque[Chunk]
    running: dict[_Future, tuple[Chunk, int]] = field(default_factory=dict)
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    num_breakdowns: int = 0
    last_news: float = field(default_factory=time.monotonic)


class Dispatcher:
    """The processes that compute rewards, and which of them does what.

    A response that takes too long, or ends its process, fails alone: the others of its chunk are sent again.

    Args:
        config: The recipe's `reward` section.
        num_processes: At least 1.
        on_news: Called whenever some responses have been graded.
    """

    def __init__(self, config: RewardsConfig, num_processes: int, on_news: Callable[[], None]) -> None:
        self._config = config
        self._options = config.options()
        self._num_processes = num_processes
        self._on_news = on_news
        self._context = RewardContext()
        # Twice as many chunks are under way as there are processes, so that none waits for its next.
        self._progress = self._context.RawArray("i", 2 * num_processes)
        self._free = list(range(2 * num_processes))
        self._pool: ProcessPool | None = None

    def start(self) -> None:
        """Start the processes unless they run; they load the rewards while the caller goes on."""
        if self._pool is None:
            arguments = (self._config, self._progress)
            self._pool = ProcessPool(
                self._num_processes, initializer=initialize, initargs=arguments, context=self._context
            )
            self._is_alive()

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
            self._free = list(range(len(self._progress)))

    def run(self, samples: Sequence[RewardInput], chunks: Iterable[Chunk]) -> Mapping[tuple[str, int], Outcome]:
        """Grade responses.

        Args:
            samples: All responses.
            chunks: Which of them each reward grades.

        Returns:
            The outcome of every index of every chunk, by reward and index.

        Raises:
            RuntimeError: The processes cannot load the rewards, do not start in time, or end before they can grade.
        """
        job = _Job(samples, deque(chunks))
        try:
            while job.waiting or job.running:
                self._submit(job)
                self._collect(job)
        except BaseException:
            # What is under way must not answer to the next call.
            self.stop()
            raise
        return job.outcomes

    def _is_alive(self) -> bool:
        """Whether there are processes; asking a new pool starts them."""
        return self._pool is not None and bool(self._pool.active)

    def _submit(self, job: _Job) -> None:
        """Send chunks until enough are under way."""
        if self._pool is not None and not self._is_alive():
            self._restart(job)
        self.start()
        assert self._pool is not None
        while job.waiting and self._free:
            chunk, slot = job.waiting.popleft(), self._free.pop()
            self._progress[slot] = 0
            samples = [job.samples[index] for index in chunk.indices]
            limit_s = CHUNK_S + self._options[chunk.reward].timeout_s
            try:
                future = self._pool.schedule(grade_chunk, (chunk.reward, slot, samples), timeout=limit_s)
            except RuntimeError:  # The processes broke down a moment ago; the next round sees to it.
                job.waiting.appendleft(chunk)
                self._free.append(slot)
                return
            job.running[future] = chunk, slot

    def _restart(self, job: _Job) -> None:
        """Begin again with new processes after those there were have ended all at once, or in the middle of a word."""
        job.num_breakdowns += 1
        if job.num_breakdowns > _MAX_BREAKDOWNS:
            raise RuntimeError(
                f"reward processes ended {job.num_breakdowns} times before they could grade a response; "
                "their output above says why, or call the rewards by hand in a Python process of its own"
            )
        job.waiting.extendleft(chunk for chunk, _ in job.running.values())
        job.running.clear()
        job.last_news = time.monotonic()
        self.stop()

    def _collect(self, job: _Job) -> None:
        """Wait for the next outcomes."""
        done, _ = wait(job.running, timeout=_NOTICE_S, return_when=FIRST_COMPLETED)
        for future in done:
            chunk, slot = job.running.pop(future)
            self._free.append(slot)
            self._settle(job, chunk, self._progress[slot], future)
        now = time.monotonic()
        limit_s = START_TIMEOUT_S + max(options.timeout_s for options in self._options.values())
        if done:
            job.last_news = now
            self._on_news()
        elif now - job.last_news > limit_s:
            raise RuntimeError(
                f"reward processes gave no sign of life for {limit_s:g} s; "
                "a module that a reward imports may hang, or a process may have been stopped from outside"
            )

    def _settle(self, job: _Job, chunk: Chunk, position: int, future: _Future) -> None:
        """Keep what a chunk came to; send again what it did not come to."""
        error = future.exception()
        if error is None:
            result = future.result()
            if isinstance(result, LoadFailure):
                raise RuntimeError(f"a reward process cannot load the rewards: {result.reason}")
            job.num_breakdowns = 0
            job.outcomes |= {(chunk.reward, i): outcome for i, outcome in zip(chunk.indices, result, strict=False)}
            self._again(job, chunk, chunk.indices[len(result) :])
        elif isinstance(error, BrokenProcessPool):
            job.waiting.appendleft(chunk)
        elif isinstance(error, TimeoutError | ProcessExpired):
            self._again(job, chunk, chunk.indices[:position] + chunk.indices[position + 1 :])
            self._blame(job, chunk, chunk.indices[position], error)
        elif len(chunk.indices) > 1:
            # One of the responses or their rows cannot be sent to another process.
            job.waiting.extendleft(Chunk(chunk.reward, (index,)) for index in chunk.indices)
        else:
            job.outcomes[chunk.reward, chunk.indices[0]] = Outcome(error=describe(error))

    def _again(self, job: _Job, chunk: Chunk, indices: tuple[int, ...]) -> None:
        if indices:
            job.waiting.appendleft(Chunk(chunk.reward, indices))

    def _blame(self, job: _Job, chunk: Chunk, index: int, error: TimeoutError | ProcessExpired) -> None:
        """A response was being graded when its process was ended for taking too long, or ended by itself."""
        if isinstance(error, TimeoutError):
            job.outcomes[chunk.reward, index] = timed_out(self._options[chunk.reward].timeout_s)
        elif chunk.is_suspect:
            job.outcomes[chunk.reward, index] = Outcome(error=f"RuntimeError: ended its process ({_how(error)})")
        else:
            # What an earlier response left behind may have ended it; alone, only its own doing can.
            job.waiting.appendleft(Chunk(chunk.reward, (index,), is_suspect=True))


def _how(error: ProcessExpired) -> str:
    code = int(error.exitcode)
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
