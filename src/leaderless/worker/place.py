"""Which worker a process is."""

from __future__ import annotations

import os
from dataclasses import dataclass

STORE_VARIABLE = "LEADERLESS_STORE"
"""A file that the workers of one machine meet at; without it they meet as torch elastic has arranged."""


@dataclass(frozen=True)
class Place:
    """Which worker this process is.

    Attributes:
        rank: Among all.
        world_size: Number of all.
        local_rank: Among those on this machine.
        local_world_size: Number of those on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        """As torch elastic says; the only worker when it says nothing."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, world_size, local_rank, local_world_size = (int(os.environ.get(name, "0")) for name in names)
        return cls(rank, world_size or 1, local_rank, local_world_size or 1)

    @staticmethod
    def is_given() -> bool:
        """Whether this process has been started as a worker, by torch elastic or something like it."""
        return "RANK" in os.environ and "WORLD_SIZE" in os.environ
