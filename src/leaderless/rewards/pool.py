"""Rewards of many responses, computed in processes beside the worker. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from leaderless.config import Json
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.child import Outcome
from leaderless.rewards.dispatch import MAX_CHUNK_SIZE, Chunk, Dispatcher
from leaderless.rewards.protocol import RewardInput
from leaderless.rewards.registry import applies_to

_CHUNKS_PER_PROCESS = 4
"""Enough that one process can take over what another has no time for."""


@dataclass(frozen=True)
class Graded:
    """What a response is worth.

    Attributes:
        value: Weighted sum over the rewards that apply to it, finite; 0 when not valid.
        is_valid: All of them could be computed. A response that is not valid must not be trained on.
        details: By reward `{"value": 1.0, "answer": "42"}`, before weighting, or `{"error": "TimeoutError: ..."}`; the
            key `reward` holds an error of the sum itself, as when no reward applies.
    """

    value: float
    is_valid: bool
    details: Mapping[str, Json]


class RewardPool:
    """Processes that compute the rewards of a recipe; a reward that hangs or crashes takes none but its own response.

    Not for several threads at a time. Results do not depend on the number of processes.

    Args:
        config: The recipe's `reward` section; without any reward, no process is started.
        num_processes: At least 1.
        on_news: Called whenever some responses have been graded.

    Raises:
        ValueError: `num_processes` is less than 1.
    """

    def __init__(
        self,
        config: RewardsConfig,
        num_processes: int,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes={num_processes}: must be at least 1")
        self._options = config.options()
        self._num_processes = num_processes
        self._dispatcher = Dispatcher(config, num_processes, on_news)
        self._is_closed = False

    def start(self) -> None:
        """Start the processes now, so that the first responses need not wait for them; returns at once.

        Call it from a thread that lives as long as the pool: the system ends the processes together with the thread
        that started them.

        Raises:
            RuntimeError: The pool is closed.
        """
        self._check_open()
        if self._options:
            self._dispatcher.start()

    def grade(self, samples: Sequence[RewardInput], sources: Sequence[str | None]) -> list[Graded]:
        """Compute what responses are worth, by all rewards that apply to their source.

        Args:
            samples: The responses.
            sources: Where the row of each comes from; None where the recipe names no such column.

        Returns:
            One for each response, in their order.

        Raises:
            ValueError: There are more or fewer sources than samples.
            RuntimeError: The pool is closed, or its processes cannot load the rewards or do not stay alive.
        """
        self._check_open()
        if len(samples) != len(sources):
            raise ValueError(f"there are {len(samples)} samples but {len(sources)} sources; give one for each sample")
        applying = [
            [name for name, options in self._options.items() if applies_to(options, source)] for source in sources
        ]
        chunks = [
            chunk
            for name in self._options
            for chunk in self._split(name, [index for index, names in enumerate(applying) if name in names])
        ]
        outcomes = self._dispatcher.run(samples, chunks)
        return [
            self._sum({name: outcomes[name, index] for name in names}) if names else _no_reward(source)
            for index, (names, source) in enumerate(zip(applying, sources, strict=True))
        ]

    def close(self) -> None:
        """End the processes. Closing twice is the same as once."""
        self._is_closed = True
        self._dispatcher.stop()

    def __enter__(self) -> Self:
        """Start the processes."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the processes."""
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the reward pool is closed; make a new one")

    def _split(self, name: str, indices: Sequence[int]) -> list[Chunk]:
        size = math.ceil(len(indices) / (_CHUNKS_PER_PROCESS * self._num_processes))
        size = max(1, min(size, MAX_CHUNK_SIZE))
        return [Chunk(name, tuple(indices[start : start + size])) for start in range(0, len(indices), size)]

    def _sum(self, outcomes: Mapping[str, Outcome]) -> Graded:
        details: dict[str, Json] = {name: _detail(outcome) for name, outcome in outcomes.items()}
        if any(outcome.error is not None for outcome in outcomes.values()):
            return Graded(0.0, is_valid=False, details=details)
        total = sum(self._options[name].weight * outcome.value for name, outcome in outcomes.items())
        if not math.isfinite(total):
            error = f"OverflowError: the weighted sum of the rewards is {total}, but must be finite"
            return Graded(0.0, is_valid=False, details=details | {"reward": {"error": error}})
        return Graded(total, is_valid=True, details=details)


def _detail(outcome: Outcome) -> Json:
    if outcome.error is not None:
        return {"error": outcome.error}
    return {"value": outcome.value, "answer": outcome.answer}


def _no_reward(source: str | None) -> Graded:
    where = "rows without a source" if source is None else f"source '{source}'"
    error = f"ValueError: no reward applies to {where}; add it to the `sources` of one, or leave out such rows"
    return Graded(0.0, is_valid=False, details={"reward": {"error": error}})
