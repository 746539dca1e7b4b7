"""Grades chunks of responses in reward processes without losing outcomes, whatever the rewards do. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from leaderless.base.leftover_processes import exit_in_words
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.protocol import Failures, GradingOutcome, RewardInput, describe, timed_out
from leaderless.rewards.reward_process import SHARE_S, PrintedText, RewardProcess, serve

START_TIMEOUT_S = 300.0
"""Seconds a reward process may take to start and to import the user's modules."""
MAX_CHUNK_SIZE = 64
_CHUNKS_PER_PROCESS = 4
"""Enough that one process can take over chunks for which another has no time."""
_MAX_FAILED_STARTS = 3
_LEEWAY_S = SHARE_S + 0.25
"""Seconds beyond the time limit of a response: others come before it, and its process itself reports that it took too
long."""
_END_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to disappear."""
_NOTICE_S = 1.0
"""Longest time between two checks whether the processes are still alive."""


@dataclass
class Chunk:
    """Responses that one reward grades one after another, or a batch reward in one call.

    Attributes:
        reward: Name of the reward.
        calls: Responses without an outcome, by their index among all, those of each call together.
        is_suspect: Whether its only call was being answered when a process ended: it is the culprit if that happens
            again.
    """

    reward: str
    calls: deque[tuple[int, ...]]
    is_suspect: bool = False


@dataclass
class _Job:
    """One call of `run`."""

    samples: Sequence[RewardInput]
    num_left: int
    failures: Failures
    num_shown: int = 0
    waiting: deque[Chunk] = field(default_factory=deque)
    outcomes: dict[tuple[str, int], GradingOutcome] = field(default_factory=dict)

    def add(self, chunk: Chunk, *graded: Sequence[GradingOutcome]) -> None:
        """Store the outcomes of the first calls of a chunk."""
        for outcomes in graded:
            self.failures.add(chunk.reward, outcomes)
            self._store(chunk, outcomes)

    def fail(self, chunk: Chunk, error: str) -> None:
        """Store a failure of all responses in the first call of a chunk."""
        self.add(chunk, [GradingOutcome(error=error)] * len(chunk.calls[0]))

    def give_up(self, chunk: Chunk) -> bool:
        """Fail what is left of a chunk if its reward is given up; returns whether it is."""
        error = self.failures.hopeless(chunk.reward)
        while error is not None and chunk.calls:
            self._store(chunk, [GradingOutcome(error=error)] * len(chunk.calls[0]))
        return error is not None

    def _store(self, chunk: Chunk, outcomes: Sequence[GradingOutcome]) -> None:
        for index, outcome in zip(chunk.calls.popleft(), outcomes, strict=True):
            self.outcomes[chunk.reward, index] = outcome
        self.num_left -= len(outcomes)

    def again(self, chunk: Chunk) -> None:
        """Have the rest of a chunk graded by whichever process is free next."""
        if chunk.calls:
            self.waiting.appendleft(chunk)


class _Grader:
    """The worker's view of a reward process, which is replaced when it ends."""

    def __init__(self, config: RewardsConfig, printed: PrintedText) -> None:
        self._config, self._printed = config, printed
        self._num_failed_starts = 0
        self.batch_rewards: frozenset[str] = frozenset()
        """Names of rewards that take a batch, once the process is ready."""
        self.suspect: Chunk | None = None
        """Chunk that only a new process can judge, before it has graded any other."""
        self.start()

    def start(self) -> None:
        """Begin with a new process."""
        self.connection, there = Pipe()
        # A file in memory; as a connection, because those can be given to spawned processes.
        self._outcomes = Connection(os.memfd_create("outcomes"))
        ends = there, self._outcomes, self._printed.writer
        self._process = RewardProcess(target=serve, args=(self._config, *ends), daemon=True)
        self._process.start()
        there.close()
        self.chunk: Chunk | None = None
        self.is_ready = self._is_closed = False
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def is_idle(self) -> bool:
        """Whether it can be given a chunk."""
        return self.is_ready and self.chunk is None

    def has_ended(self) -> bool:
        """Whether the process has ended, and all its messages were received."""
        return self._is_closed or not (self._process.is_alive() or self.connection.poll())

    def is_late(self) -> bool:
        """Whether the process exceeds its time."""
        return not self.is_idle and time.monotonic() > self.deadline and not self.connection.poll()

    def stop(self) -> str:
        """End the process, whatever it is doing; returns its exit code, or the name of a signal."""
        # A process that has closed its connection is about to end, with an exit code of its own.
        self._process.join(_NOTICE_S if self._is_closed else 0.0)
        self._process.end(_END_TIMEOUT_S)
        self.connection.close()
        return exit_in_words(self._process.exitcode or 0)

    def replace(self) -> tuple[str, list[list[GradingOutcome]], bool]:
        """Start a new process; returns how the old one ended, its outcomes by call, and whether it was in the next.

        Raises:
            RuntimeError: Several in a row ended before they could grade a response.
        """
        self._num_failed_starts = 0 if self.is_ready else self._num_failed_starts + 1
        how = self.stop()
        outcomes, is_grading = self.outcomes()
        if self._num_failed_starts > _MAX_FAILED_STARTS:
            raise RuntimeError(
                f"reward processes ended {self._num_failed_starts} times before they could grade a response; "
                "their output above says why, or set run.reward_processes=0 to see it happen in the worker"
            )
        self.start()
        return how, outcomes, is_grading

    def send(self, chunk: Chunk, calls: Sequence[Sequence[RewardInput]], timeout_s: float) -> None:
        """Have a chunk graded, each call within the time limit."""
        file = self._outcomes.fileno()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)  # for the process as well
        self.connection.send((chunk.reward, calls))
        self.chunk = chunk
        self.deadline = time.monotonic() + timeout_s + _LEEWAY_S

    def receive(self) -> bool:
        """Whether the process has loaded the rewards or finished its chunk; else it has ended."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._is_closed = True
            return False
        if message:
            loaded: list[str] | str = json.loads(message)
            if isinstance(loaded, str):
                raise RuntimeError(f"a reward process cannot load the rewards: {loaded}")
            self.batch_rewards = frozenset(loaded)
        self.is_ready = True
        return True

    @property
    def num_graded(self) -> int:
        """Number of responses of the chunk that were graded."""
        return sum(map(len, islice(self.chunk.calls, len(self._lines()) - 1))) if self.chunk else 0

    def outcomes(self) -> tuple[list[list[GradingOutcome]], bool]:
        """Outcomes of the first calls of the chunk, as far as they were graded; whether the next one had begun."""
        *lines, unfinished = self._lines()
        graded = [[GradingOutcome(*values) for values in json.loads(line)] for line in lines]
        return graded, bool(unfinished)

    def _lines(self) -> list[bytes]:
        """What the process has written of each call, and of one that it has not finished."""
        return os.pread(self._outcomes.fileno(), os.fstat(self._outcomes.fileno()).st_size, 0).split(b"\n")


class Dispatcher:
    """Grades in reward processes.

    A response that takes too long, or ends its process, fails alone: earlier outcomes are kept, and the responses after
    it are graded by another process. A batch fails as one.

    Args:
        config: The recipe's `reward` section.
        num_processes: Number of processes, at least 1.
        on_news: Function to call, with how many are done, whenever some responses have been graded.
    """

    def __init__(self, config: RewardsConfig, num_processes: int, on_news: Callable[[str], None]) -> None:
        self._config = config
        self._timeouts_s = {name: options.timeout_s for name, options in config.options().items()}
        self._num_processes = num_processes
        self._on_news = on_news
        self._graders: list[_Grader] = []

    def start(self) -> None:
        """Start the processes unless they run; they load the rewards while the caller continues."""
        if not self._graders:
            self._printed = PrintedText()
            self._graders = [_Grader(self._config, self._printed) for _ in range(self._num_processes)]

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        if not self._graders:
            return
        while self._graders:
            self._graders.pop().stop()
        self._printed.close(_NOTICE_S)

    def run(
        self, samples: Sequence[RewardInput], work: Mapping[str, Sequence[int]], failures: Failures
    ) -> Mapping[tuple[str, int], GradingOutcome]:
        """Outcomes by reward and index of the response, of those that each reward has to grade.

        Raises:
            RuntimeError: The processes cannot load the rewards, do not start in time, or end before they can grade.
        """
        job, is_split = _Job(samples, sum(map(len, work.values())), failures), False
        if job.num_left:
            self.start()
            self._printed.begin()
        try:
            while job.num_left:
                for grader in self._graders:
                    if grader.is_ready and not is_split:
                        chunks = (self._split(*one, in_batch=one[0] in grader.batch_rewards) for one in work.items())
                        job.waiting, is_split = deque(chain(*chunks)), True
                    self._look_after(job, grader)
                    self._feed(job, grader)
                self._collect(job)
        except BaseException:
            # Responses that are being graded must not answer the next call.
            self.stop()
            raise
        return job.outcomes

    def _split(self, name: str, indices: Sequence[int], *, in_batch: bool = False) -> list[Chunk]:
        if in_batch:
            return [Chunk(name, deque([tuple(sorted(indices))]))] if indices else []
        size = math.ceil(len(indices) / (_CHUNKS_PER_PROCESS * self._num_processes))
        size = max(1, min(size, MAX_CHUNK_SIZE))
        calls = [(index,) for index in indices]
        return [Chunk(name, deque(calls[start : start + size])) for start in range(0, len(calls), size)]

    def _look_after(self, job: _Job, grader: _Grader) -> None:
        """Replace a process that has ended, or that takes too long."""
        chunk, has_ended = grader.chunk, grader.has_ended()
        is_over = chunk is not None and job.failures.hopeless(chunk.reward) is not None
        if not has_ended and not grader.is_late() and not is_over:
            return
        if not has_ended and chunk is None:
            raise RuntimeError(
                f"reward processes gave no sign of life for {START_TIMEOUT_S:g} s; "
                "a module that a reward imports may hang, or a process may have been stopped from outside"
            )
        how, outcomes, is_grading = grader.replace()
        if chunk is None:
            return
        job.add(chunk, *outcomes)
        # Between two calls, the next one is not to blame: the late one has finished after all, or an earlier one has
        # ended the process. But if nothing at all was done, it is the first one, else this might never end.
        has_culprit = bool(chunk.calls) and (is_grading or not outcomes) and not is_over
        if has_culprit and not has_ended:
            job.fail(chunk, timed_out(self._timeouts_s[chunk.reward], len(chunk.calls[0])))
        elif has_culprit and chunk.is_suspect:
            job.fail(chunk, f"RuntimeError: ended its process ({how})")
        elif has_culprit:
            # An earlier response may have caused that; in a new process, only this one can.
            grader.suspect = Chunk(chunk.reward, deque([chunk.calls.popleft()]), is_suspect=True)
        job.again(chunk)

    def _feed(self, job: _Job, grader: _Grader) -> None:
        """Give an idle process a chunk."""
        while grader.is_idle and (grader.suspect or job.waiting):
            chunk, grader.suspect = grader.suspect or job.waiting.popleft(), None
            if job.give_up(chunk):
                continue
            calls = [[job.samples[index] for index in call] for call in chunk.calls]
            try:
                grader.send(chunk, calls, self._timeouts_s[chunk.reward])
            except OSError:  # The process has ended, which is noticed in the next round.
                job.again(chunk)
                return
            except Exception as error:  # noqa: BLE001 - one of the responses or their rows cannot be pickled
                if len(chunk.calls) == 1:
                    job.fail(chunk, describe(error))
                job.waiting.extendleft(Chunk(chunk.reward, deque([call])) for call in chunk.calls)

    def _collect(self, job: _Job) -> None:
        """Wait for the next outcomes."""
        now = time.monotonic()
        due_s = (grader.deadline - now for grader in self._graders if not grader.is_idle)
        timeout_s = max(0.0, min([_NOTICE_S, *due_s])) if job.num_left else 0.0
        ready = wait([grader.connection for grader in self._graders], timeout_s)
        for grader in self._graders:
            if grader.connection in ready and grader.receive() and grader.chunk is not None:
                job.add(grader.chunk, *grader.outcomes()[0])
                job.again(grader.chunk)
                grader.chunk = None
        num_graded = len(job.outcomes) + sum(grader.num_graded for grader in self._graders)
        if num_graded > job.num_shown:
            job.num_shown = num_graded
            self._on_news(f", {num_graded}/{len(job.outcomes) + job.num_left} graded")
