"""Value and gradient of the whole loss depend on neither padding, order, micro-batches nor ranks; and edges."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.unit.algorithms.naive import AGGREGATIONS, CASES, Case, random_batch
from torch import Tensor

from leaderless.algorithms import Aggregation, Denominators, pack, token_weights

LENGTHS = (3, 0, 6, 1, 4, 2, 6, 5)
IS_VALID = torch.tensor([True, True, True, True, False, True, True, True])
NORM = 8


@dataclass(frozen=True)
class Padded:
    """Log-probs, old log-probs and advantages, [B, T] each."""

    new: Tensor
    old: Tensor
    gain: Tensor
    mask: Tensor


def padded(case: Case, fill: tuple[float, float, float], *, has_gaps: bool = True) -> Padded:
    """Eight responses of 0 to 6 tokens in 9 columns, scattered over the row, as after turns of a tool."""
    batch = random_batch(3, LENGTHS, is_per_response=case.is_per_response)
    columns = [torch.full((8, 9), value, dtype=torch.float64) for value in fill]
    mask = torch.zeros(8, 9, dtype=torch.bool)
    for row, response in enumerate(batch):
        places = sorted((2 * row + 4 * i) % 9 for i in range(len(response))) if has_gaps else range(len(response))
        for place, token in zip(places, response, strict=True):
            mask[row, place] = True
            for column, number in zip(columns, token, strict=True):
                column[row, place] = number
    return Padded(*columns, mask)


def value_and_gradient(
    case: Case, batch: Padded, aggregation: Aggregation, parts: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """The loss summed over parts of the batch; the denominators are summed over the parts as they are over ranks."""
    leaf = batch.new.clone().requires_grad_()
    packs, counts = [], []
    for rows in parts:
        new, lengths = pack(leaf[rows], batch.mask[rows])
        old, gain = (pack(column[rows], batch.mask[rows])[0] for column in (batch.old, batch.gain))
        packs.append((new, old, gain, lengths))
        counts.append(Denominators.count(lengths, IS_VALID[rows]))
    totals = Denominators(*torch.stack(counts).sum(0).tolist())
    value = torch.zeros((), dtype=torch.float64)
    for rows, columns in zip(parts, packs, strict=True):
        weights = token_weights(aggregation, columns[3], IS_VALID[rows], totals, norm_tokens=NORM)
        value = value + (weights * case.loss(*columns).loss).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def ranks(world_size: int) -> list[list[int]]:
    """Rows distributed over ranks, each of which takes micro-batches of two."""
    return [part for rank in range(world_size) for part in chunks(list(range(rank, 8, world_size)), 2)]


SPLITS = {
    "8 rows, reversed": [[7, 6, 5, 4, 3, 2, 1, 0]],
    "8 rows, shuffled": [[3, 1, 7, 0, 5, 2, 6, 4]],
    "2 x 4": chunks(list(range(8)), 4),
    "8 x 1": chunks(list(range(8)), 1),
    "1 rank": ranks(1),
    "2 ranks": ranks(2),
    "4 ranks": ranks(4),
    "a rank without rows": [[], [4, 0, 6, 2], [1], [3, 5, 7]],
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_do_not_depend_on_order_micro_batches_or_ranks(name: str, aggregation: Aggregation) -> None:
    batch = padded(CASES[name], (0.0, 0.0, 0.0))
    expected = value_and_gradient(CASES[name], batch, aggregation, [list(range(8))])
    assert expected[1].any()
    for split in SPLITS.values():
        torch.testing.assert_close(value_and_gradient(CASES[name], batch, aggregation, split), expected)


@pytest.mark.parametrize("fill", [(float("nan"),) * 3, (1e30, -1e30, 1e30), (float("inf"), float("-inf"), 1.0)])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_do_not_depend_on_what_is_masked(name: str, fill: tuple[float, float, float]) -> None:
    whole = [list(range(8))]
    clean, dirty = (padded(CASES[name], content) for content in ((0.0, 0.0, 0.0), fill))
    for aggregation in AGGREGATIONS:
        expected = value_and_gradient(CASES[name], clean, aggregation, whole)
        result = value_and_gradient(CASES[name], dirty, aggregation, whole)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert not result[1][~dirty.mask].any()


def padded_mean(losses: Tensor, mask: Tensor, aggregation: Aggregation) -> Tensor:
    """As a framework with padded tensors computes it, for the rows that count."""
    losses, mask = torch.where(mask, losses, 0.0)[IS_VALID], mask[IS_VALID]
    has_tokens = mask.any(dim=1)
    match aggregation:
        case "token_mean":
            return losses.sum() / mask.sum()
        case "sequence_mean_token_mean":
            return (losses.sum(dim=1)[has_tokens] / mask.sum(dim=1)[has_tokens]).mean()
        case "sequence_mean_token_sum":
            return losses.sum(dim=1)[has_tokens].mean()
        case "sequence_mean_token_sum_norm":
            return losses.sum(dim=1)[has_tokens].mean() / NORM


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_packed_and_padded_forms_have_one_value_and_gradient(name: str, aggregation: Aggregation) -> None:
    case = CASES[name]
    batch = padded(case, (0.0, 0.0, 0.0), has_gaps=False)
    leaf = batch.new.clone().requires_grad_()
    rows = []
    for row, length in enumerate(LENGTHS):  # one row at a time: nothing is packed
        loss = case.loss(leaf[row, :length], batch.old[row, :length], batch.gain[row, :length], torch.tensor([length]))
        rows.append(torch.nn.functional.pad(loss.loss, (0, 9 - length)))
    value = padded_mean(torch.stack(rows), batch.mask, aggregation)
    expected = value.detach(), torch.autograd.grad(value, leaf)[0]
    result = value_and_gradient(case, batch, aggregation, [list(range(8))])
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_extreme_log_ratios_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    new = torch.tensor([-1e4, -1e4, -1e4, 0.0, 0.0, 0.0, -200.0, 1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([0.0, 0.0, 1e4, -1e4, -1e4, -1e4, 0.0, 0.0, 1e4, -1e4], dtype=dtype)
    gain = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 0.0, 0.0, -1.0, 2.0, 2.0], dtype=dtype)
    for lengths in (torch.ones(10, dtype=torch.int64), torch.tensor([4, 0, 6]), torch.tensor([10])):
        loss = CASES[name].loss(new, old, gain, lengths).loss
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [name for name in CASES if name != "k2" and not name.startswith("value")])
def test_a_log_prob_that_stands_for_impossible_gives_a_finite_loss(name: str) -> None:
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old, gain = torch.full((3,), -1e30), torch.tensor([1.0, -1.0, 0.0])
    loss = CASES[name].loss(new, old, gain, torch.tensor([1, 1, 1])).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_no_tokens_give_no_loss(name: str) -> None:
    for lengths in (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])):
        new = torch.empty(0, requires_grad=True)
        result = CASES[name].loss(new, torch.empty(0), torch.empty(0), lengths)
        assert result.loss.shape == result.is_clipped.shape == (0,)
        result.loss.sum().backward()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_batch_in_which_nothing_counts_has_zero_loss_and_gradient(name: str, aggregation: Aggregation) -> None:
    new, old, gain = (torch.rand(5) for _ in range(3))
    lengths, is_valid = torch.tensor([2, 3]), torch.tensor([False, False])
    totals = Denominators(*Denominators.count(lengths, is_valid).tolist())
    new.requires_grad_()
    loss = (
        token_weights(aggregation, lengths, is_valid, totals) * CASES[name].loss(new, old, gain, lengths).loss
    ).sum()
    assert loss == 0
    assert not torch.autograd.grad(loss, new)[0].any()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_inputs_are_computed_with_in_float32(name: str) -> None:
    batch = padded(CASES[name], (0.0, 0.0, 0.0))
    new, lengths = pack(batch.new.bfloat16(), batch.mask)
    old, gain = (pack(column.bfloat16(), batch.mask)[0] for column in (batch.old, batch.gain))
    results = []
    for cast in (torch.Tensor.clone, torch.Tensor.float):
        leaf = cast(new).requires_grad_()
        loss = CASES[name].loss(leaf, cast(old), cast(gain), lengths).loss
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0].float()))
    (half, half_gradient), (full, full_gradient) = results
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(half_gradient, full_gradient, rtol=2**-7, atol=1e-6)
