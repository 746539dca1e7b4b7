"""Rows of a tensor that are taken several times, with gradients that are added up precisely."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.models.parallel.reductions import mapped
from leaderless.models.uploads import placed


class Repeats:
    """Rows of a tensor that are taken, some of them several times, and some perhaps not at all.

    The backward pass of `index_select` adds gradients up one by one, in bfloat16 and in the order in which threads
    arrive: the gradient of a row would lose digits each time it was taken, and differ from pass to pass. Here they are
    added up in float32 and in a fixed order. FlashAttention's own backward pass may add up in any order all the same.
    """

    def __init__(self, rows: Tensor, num_rows: int, device: torch.device) -> None:
        """Plan to take [n] int64 rows, which are on the host, of a tensor with `num_rows` on a device."""
        counts, order = rows.bincount(minlength=num_rows), rows.argsort(stable=True)
        begins = counts.cumsum(0) - counts
        self._rows, self._num_rows, self._has_all = placed(rows, device), num_rows, bool(counts.all())
        # By number of times: rows that are taken so often, and [rows, times] places where.
        self._places: list[tuple[Tensor, Tensor]] = []
        for times in sorted(set(counts.tolist()) - {0}):
            own = (counts == times).nonzero().squeeze(1)
            places = order[begins[own][:, None] + torch.arange(times)]
            self._places.append((placed(own, device), placed(places, device)))

    def take(self, values: Tensor) -> Tensor:
        """Turn [num_rows, ...] into [n, ...]."""
        return mapped(values, lambda own: own.index_select(0, self._rows), self._add_up)

    def _add_up(self, grad: Tensor) -> Tensor:
        """The sums of [n, ...] gradients over the places of each row, [num_rows, ...]."""
        make = grad.new_empty if self._has_all else grad.new_zeros
        total = make(self._num_rows, *grad.shape[1:])
        dtype = torch.promote_types(grad.dtype, torch.float32)
        for rows, places in self._places:
            parts = grad.index_select(0, places.flatten()).view(*places.shape, *grad.shape[1:])
            total.index_copy_(0, rows, parts.sum(1, dtype=dtype).to(grad.dtype))
        return total
