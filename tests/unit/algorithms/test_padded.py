"""Conversion from padded tensors to packed ones and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leaderless.algorithms import pack, unpack

masks = st.integers(0, 5).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), max_size=5).map(
        lambda rows: torch.tensor(rows, dtype=torch.bool).reshape(len(rows), width)
    )
)


def test_pack_worked_by_hand() -> None:
    values = torch.tensor([[1.0, math.nan, 2.0], [1e30, math.inf, -math.inf], [3.0, 4.0, 5.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    result, lengths = pack(values, mask)
    assert result.tolist() == [1, 2, 3, 4, 5]
    assert lengths.tolist() == [2, 0, 3]
    assert unpack(result, mask, fill=-1.0).tolist() == [[1, -1, 2], [-1, -1, -1], [3, 4, 5]]


@given(mask=masks, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
def test_unpack_undoes_pack(mask: torch.Tensor, dtype: torch.dtype) -> None:
    values = torch.arange(mask.numel()).reshape(mask.shape).to(dtype)
    result, lengths = pack(values, mask)
    rows = zip(values.tolist(), mask.tolist(), strict=True)
    naive = [[value for value, ok in zip(*row, strict=True) if ok] for row in rows]
    assert result.tolist() == [value for row in naive for value in row]
    assert lengths.tolist() == [len(row) for row in naive]
    padded = unpack(result, mask)
    assert padded.dtype == dtype
    assert torch.equal(padded, torch.where(mask, values, 0))


def test_gradients_pass_both_ways_and_leave_what_is_masked_alone() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    values = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = values.masked_fill(~mask, math.nan).requires_grad_()
    (pack(leaf, mask)[0] ** 2).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.where(mask, 2 * values, 0.0))
    packed = pack(values, mask)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unpack(x, mask), packed)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_values_of_another_mask_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} of them for the 3 places of the mask"):
        unpack(torch.zeros(count), torch.tensor([[1, 1, 0], [0, 0, 1]]))
