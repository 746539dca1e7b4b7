"""Memory through which the numbers of a pass reach the device: one piece, one copy."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.base.devices import can_pin
from leaderless.planner.memory.limits import bucket_of
from leaderless.rollout.native.paged_plan import (
    TILE_ROWS,
    Arrangement,
    Fields,
    Ints,
    PagedPlan,
    Results,
    WorkItems,
    fields_of,
    num_bytes,
)
from leaderless.rollout.native.pages import PagePool

BUFFERS = 2
"""Pieces of host memory that are used in turn: the device may still be reading the last one."""


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that a device copies by itself, if there is such memory."""
    return torch.empty(shape, dtype=dtype, pin_memory=can_pin(device.type))


class Staging:
    """The memory of passes over at most some rows, on the host and on the device.

    Attributes:
        num_allocations: Number of times that its memory on the device was allocated; recorded passes use the last one.
    """

    def __init__(
        self, most_rows: int, page_size: int, longest: int, device: torch.device, num_recorded: int = 0
    ) -> None:
        """Allocate nothing yet. Lists of pages are for sequences of `longest` tokens, and for as many prompts.

        With each token and its log-probability come `num_recorded` further numbers.
        """
        self._most_rows, self._device = bucket_of(most_rows), device
        self._num_numbers = 2 + num_recorded
        self._most_pages = 2 * self._most_rows * -(-longest // page_size)
        self.num_allocations = 0
        self.release()

    def release(self) -> None:
        """Release the memory."""
        self._there = self._drawn = self._logits = torch.empty(0)
        self._here: list[Tensor] = []
        self._turn = 0
        self._plans: dict[int, PagedPlan] = {}
        self._hosts: dict[tuple[int, int], Fields] = {}
        self._bucket = 0

    def host(self, arrangement: Arrangement, pages: PagePool, lengths: Ints) -> Fields:
        """Choose host memory for the numbers of the next pass, with room for the pages of segments of some lengths."""
        needed = arrangement.num_listed(lengths, pages.page_size)
        if needed > self._most_pages or not self._here:
            self._allocate(max(needed, self._most_pages))
        self._bucket, self._turn = bucket_of(len(lengths)), (self._turn + 1) % BUFFERS
        key = self._turn, self._bucket
        if key not in self._hosts:
            self._hosts[key] = fields_of(self._here[self._turn], self._bucket)
        return self._hosts[key]

    def _allocate(self, num_pages: int) -> None:
        self.release()
        self._most_pages = num_pages
        size = num_bytes(self._most_rows, num_pages)
        self._here = [pinned((size,), torch.uint8, self._device) for _ in range(BUFFERS)]
        self._there = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._drawn = torch.zeros(self._num_numbers * self._most_rows, dtype=torch.int64, device=self._device)
        self._results = Results(self._most_rows, self._device)
        self._each = torch.arange(self._most_rows, dtype=torch.int32, device=self._device)
        self.num_allocations += 1

    def send(self, arrangement: Arrangement, lengths: Ints, pages: PagePool) -> PagedPlan:
        """Add the items of the pass and copy all of it; `lengths` are [n] own tokens with the new one."""
        host = self._hosts[self._turn, self._bucket]
        longest, longest_shared, num_listed = arrangement.write(host, lengths, pages)
        end = host.pages.storage_offset() * 4 + 4 * num_listed
        self._there[:end].copy_(self._here[self._turn][:end], non_blocking=True)
        if self._bucket not in self._plans:
            there = fields_of(self._there, self._bucket)
            own = WorkItems(there.own, self._each[: self._bucket], 1)
            shared = WorkItems(there.shared, there.rows, TILE_ROWS)
            self._plans[self._bucket] = PagedPlan(
                *there[:4], own, shared, there.runs, there.pages, pages.page_size, self._results
            )
        plan = self._plans[self._bucket]
        plan.own.longest, plan.shared.longest = longest, longest_shared
        return plan

    def drawn(self, rows: int) -> Tensor:
        """Memory for what is drawn for some rows, [2 or more, rows] int64.

        It is for tokens, bits of float64 log-probabilities, and what is recorded with them.
        """
        return self._drawn[: self._num_numbers * rows].view(self._num_numbers, rows)

    def logits(self, rows: int, vocabulary: int) -> Tensor:
        """Memory for logits, [rows, vocabulary] float32, of rows that are drawn in several ways."""
        if self._logits.numel() < rows * vocabulary:
            self._logits = torch.empty(self._most_rows * vocabulary, device=self._device)
        return self._logits[: rows * vocabulary].view(rows, vocabulary)
