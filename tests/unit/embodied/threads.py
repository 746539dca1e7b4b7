"""Ranks that are threads of the test."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from leaderless.distributed.transport import ProcessGroup


class Threads(ProcessGroup):
    """A rank of a group that are threads, which meet in each exchange."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[Tensor]) -> None:
        super().__init__(tuple(range(len(parts))), rank)
        self._barrier, self._parts = barrier, parts

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:  # noqa: ARG002
        self._parts[self.rank] = rows
        self._barrier.wait(60)
        found = list(self._parts)
        self._barrier.wait(60)
        return found

    def sum(self, values: Tensor, what: str = "") -> Tensor:
        return torch.stack(self.gather(values, what)).sum(0)
