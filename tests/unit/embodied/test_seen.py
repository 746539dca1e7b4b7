"""What policies take of what is seen: instructions as one table, made at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.embodied.policies.observations import padded

CPU = torch.device("cpu")


@pytest.mark.parametrize("ids", [[], [[]], [[], []], [[3]], [[1, 2], [], [7, 8, 9]], [[0]] * 5])
def test_instructions_are_padded_with_0(ids: list[list[int]]) -> None:
    table, lengths = padded(ids, CPU)
    longest = max([1, *map(len, ids)])
    assert table.tolist() == [row + [0] * (longest - len(row)) for row in ids]
    assert lengths.tolist() == [len(row) for row in ids]
    assert table.dtype == lengths.dtype == torch.int64
    assert table.shape == (len(ids), longest)


class Counting(TorchDispatchMode):
    """Counts operations on tensors."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_as_many_operations_are_needed_for_many_rows_as_for_few() -> None:
    """With a tensor for each row, a pass over 400 decisions took more time here than in the network."""
    counts = []
    for num in (2, 400):
        with Counting() as counting:
            padded([[1, 2, 3]] * num, CPU)
        counts.append(counting.num)
    assert counts[0] == counts[1] < 20
