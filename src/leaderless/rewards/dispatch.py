"""Reward processes receive chunks of responses and send outcomes back, whatever the rewards do. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.grading import Outcome, Outcomes, describe, timed_out
from leaderless.rewards.process import RewardProcess, serve
from leaderless.rewards.protocol import RewardInput

START_TIMEOUT_S = 300.0
"""Seconds a reward process may take to start and to import the user's modules."""
MAX_CHUNK_SIZE = 64
_CHUNKS_PER_PROCESS = 4
"""Enough that one process can take over what another has no time for."""
_MAX_FAILED_STARTS = 3
_LEEWAY_S = 0.25
"""Seconds beyond the time limit of a response, in which its process would report by itself that it took too long."""
_END_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to disappear."""
_READ_BYTES = 2**16
_NOTICE_S = 1.0
"""Longest time between two looks at whether the processes are still there."""


@dataclass
class Chunk:
    """Responses that one reward grades one after another.

    Attributes:
        reward: Name of the reward.
        indices: Responses without an outcome, by their index among all; the first one is being graded.
        is_suspect: Its only response was being graded when a process ended: it is the culprit if that happens again.
    """

    reward: str
    indices: deque[int]
    is_suspect: bool = False


@dataclass
class _Job:
    """One call of `run`."""

    samples: Sequence[RewardInput]
    waiting: deque[Chunk]
    num_left: int
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)

    def add(self, chunk: Chunk, outcome: Outcome) -> None:
        """Keep the outcome of the response that a chunk is at."""
        self.outcomes[chunk.reward, chunk.indices.popleft()] = outcome
        self.num_left -= 1

    def again(self, chunk: Chunk) -> None:
        """Have the rest of a chunk graded by whichever process is free next."""
        if chunk.indices:
            self.waiting.appendleft(chunk)


class _Grader:
    """A reward process as its worker sees it; a new one takes its place when it ends."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._num_failed_starts = 0
        self.suspect: Chunk | None = None
        self._start()

    def _start(self) -> None:
        self.connection, there = Pipe()
        self._process = RewardProcess(target=serve, args=(self._config, there), daemon=True)
        self._process.start()
        there.close()
        self.chunk: Chunk | None = None
        self.is_ready = self.is_closed = False
        self._unfinished = b""
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def is_idle(self) -> bool:
        """Whether it can be given a chunk."""
        return self.is_ready and self.chunk is None

    def has_ended(self) -> bool:
        """Whether the process has ended, and all that it sent was received."""
        return self.is_closed or not (self._process.is_alive() or self.connection.poll())

    def is_late(self) -> bool:
        """Whether the process takes longer than it may."""
        return not self.is_idle and time.monotonic() > self.deadline and not self.connection.poll()

    def stop(self, patience_s: float = 0.0) -> str:
        """End the process, whatever it is doing.

        Args:
            patience_s: Time for a process to end that is about to.

        Returns:
            How it ended: its exit code, or the name of a signal.
        """
        self._process.join(patience_s)
        self._process.kill()
        self._process.join(_END_TIMEOUT_S)
        self.connection.close()
        code = self._process.exitcode or 0
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def replace(self) -> str:
        """Begin again with a new process.

        Returns:
            How the old one ended.

        Raises:
            RuntimeError: Several in a row ended before they could grade a response.
        """
        self._num_failed_starts = 0 if self.is_ready else self._num_failed_starts + 1
        how = self.stop(patience_s=_NOTICE_S if self.is_closed else 0.0)
        if self._num_failed_starts > _MAX_FAILED_STARTS:
            raise RuntimeError(
                f"reward processes ended {self._num_failed_starts} times before they could grade a response; "
                "their output above says why, or set run.reward_processes=0 to see it happen in the worker"
            )
        self._start()
        return how

    def next_of(self, waiting: deque[Chunk]) -> Chunk | None:
        """The chunk to grade next: before all others one that only a new process can judge."""
        suspect, self.suspect = self.suspect, None
        return suspect or (waiting.popleft() if waiting else None)

    def send(self, chunk: Chunk, samples: Sequence[RewardInput], timeout_s: float) -> None:
        """Have a chunk graded.

        Args:
            chunk: What to grade.
            samples: Responses of the chunk.
            timeout_s: Time limit of each response.
        """
        self.connection.send((chunk.reward, samples))
        self.chunk = chunk
        self.deadline = time.monotonic() + timeout_s + _LEEWAY_S

    def receive(self) -> list[Any]:
        """What the process has sent since the last call, parsed; waits for it if there is nothing."""
        try:
            data = os.read(self.connection.fileno(), _READ_BYTES)
        except ConnectionResetError:
            data = b""
        self.is_closed = not data
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Dispatcher:
    """Grades in reward processes.

    A response that takes too long, or ends its process, fails alone: outcomes that were there before are kept, and what
    was to come after it is graded by another process.

    Args:
        config: The recipe's `reward` section.
        num_processes: Number of processes, at least 1.
        on_news: Function to call whenever some responses have been graded.
    """

    def __init__(self, config: RewardsConfig, num_processes: int, on_news: Callable[[], None]) -> None:
        self._config = config
        self._timeouts_s = {name: options.timeout_s for name, options in config.options().items()}
        self._num_processes = num_processes
        self._on_news = on_news
        self._graders: list[_Grader] = []

    def start(self) -> None:
        """Start the processes unless they run; they load the rewards while the caller continues."""
        if not self._graders:
            self._graders = [_Grader(self._config) for _ in range(self._num_processes)]

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        while self._graders:
            self._graders.pop().stop()

    def run(self, samples: Sequence[RewardInput], work: Mapping[str, Sequence[int]]) -> Outcomes:
        """Grade responses.

        Args:
            samples: All responses.
            work: Indices of the responses that each reward grades, by reward.

        Returns:
            The outcomes by reward and index.

        Raises:
            RuntimeError: The processes cannot load the rewards, do not start in time, or end before they can grade.
        """
        chunks = deque(chunk for name, indices in work.items() for chunk in self._split(name, indices))
        job = _Job(samples, chunks, sum(map(len, work.values())))
        if job.num_left:
            self.start()
        try:
            while job.num_left:
                for grader in self._graders:
                    self._look_after(job, grader)
                    self._feed(job, grader)
                self._collect(job)
        except BaseException:
            # What is being graded must not answer to the next call.
            self.stop()
            raise
        return job.outcomes

    def _split(self, name: str, indices: Sequence[int]) -> list[Chunk]:
        size = math.ceil(len(indices) / (_CHUNKS_PER_PROCESS * self._num_processes))
        size = max(1, min(size, MAX_CHUNK_SIZE))
        return [Chunk(name, deque(indices[start : start + size])) for start in range(0, len(indices), size)]

    def _look_after(self, job: _Job, grader: _Grader) -> None:
        """Replace a process that has ended, or that takes too long."""
        chunk = grader.chunk
        if grader.has_ended():
            how = grader.replace()
            if chunk is not None and chunk.indices:
                self._blame(job, grader, chunk, how)
        elif grader.is_late():
            if chunk is None:
                raise RuntimeError(
                    f"reward processes gave no sign of life for {START_TIMEOUT_S:g} s; "
                    "a module that a reward imports may hang, or a process may have been stopped from outside"
                )
            grader.replace()
            if chunk.indices:
                job.add(chunk, timed_out(self._timeouts_s[chunk.reward]))
            job.again(chunk)
            self._on_news()

    def _blame(self, job: _Job, grader: _Grader, chunk: Chunk, how: str) -> None:
        """A response was being graded when its process ended."""
        if chunk.is_suspect:
            job.add(chunk, Outcome(error=f"RuntimeError: ended its process ({how})"))
            return
        # What an earlier response left behind may have ended it; in a new process only its own doing can.
        grader.suspect = Chunk(chunk.reward, deque([chunk.indices.popleft()]), is_suspect=True)
        job.again(chunk)

    def _feed(self, job: _Job, grader: _Grader) -> None:
        """Give an idle process a chunk."""
        while grader.is_idle and (chunk := grader.next_of(job.waiting)):
            samples = [job.samples[index] for index in chunk.indices]
            try:
                grader.send(chunk, samples, self._timeouts_s[chunk.reward])
            except OSError:  # The process has ended, which is noticed in the next round.
                job.again(chunk)
                return
            except Exception as error:  # noqa: BLE001 - one of the responses or their rows cannot be pickled
                if len(chunk.indices) == 1:
                    job.add(chunk, Outcome(error=describe(error)))
                job.waiting.extendleft(Chunk(chunk.reward, deque([index])) for index in chunk.indices)

    def _collect(self, job: _Job) -> None:
        """Wait for the next outcomes."""
        now = time.monotonic()
        due_s = (grader.deadline - now for grader in self._graders if not grader.is_idle)
        timeout_s = max(0.0, min([_NOTICE_S, *due_s])) if job.num_left else 0.0
        ready = wait([grader.connection for grader in self._graders], timeout_s)
        for grader in self._graders:
            if grader.connection in ready:
                self._receive(job, grader)
        if ready:
            self._on_news()

    def _receive(self, job: _Job, grader: _Grader) -> None:
        """Keep what a process has sent."""
        for message in grader.receive():
            if isinstance(message, str):
                raise RuntimeError(f"a reward process cannot load the rewards: {message}")
            if grader.chunk is None:
                grader.is_ready = True
            elif message is None:
                job.again(grader.chunk)
                grader.chunk = None
            else:
                job.add(grader.chunk, Outcome(*message))
                grader.deadline = time.monotonic() + self._timeouts_s[grader.chunk.reward] + _LEEWAY_S
