"""The place of a process among the workers of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STORE_VARIABLE = "LEADERLESS_STORE"
"""File at which the workers of one machine meet; without it they meet as torch elastic has arranged."""


@dataclass(frozen=True)
class RankInfo:
    """Place of this process among the workers of a run.

    Attributes:
        rank: Rank among all workers.
        world_size: Number of all workers.
        local_rank: Rank among the workers of this machine.
        local_world_size: Number of workers of this machine.
        store: File at which the workers of one machine meet; None where torch elastic has arranged it otherwise.
        is_guest: Whether the process belongs to a program that continues after the run, such as a notebook.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: Path | None = None
    is_guest: bool = False

    @classmethod
    def alone(cls, *, is_guest: bool = False) -> RankInfo:
        """The place of the only worker."""
        return cls(0, 1, 0, 1, is_guest=is_guest)

    @classmethod
    def from_environment(cls) -> RankInfo:
        """The place that torch elastic has given to this process; else the place of the only worker."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, world_size, local_rank, local_world_size = (int(os.environ.get(name, "0")) for name in names)
        store = os.environ.get(STORE_VARIABLE)
        return cls(rank, world_size or 1, local_rank, local_world_size or 1, Path(store) if store else None)

    @staticmethod
    def is_given() -> bool:
        """Whether this process has been started as a worker, by torch elastic or something like it."""
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ
