"""The weight of each token in the loss, exact over the mini-batch however it is split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.algorithms.naive import AGGREGATIONS
from torch import Tensor

from leaderless.algorithms import Aggregation, Denominators, token_weights

samples = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=16)


def totals_of(lengths: Tensor, is_valid: Tensor) -> Denominators:
    return Denominators(*Denominators.count(lengths, is_valid).tolist())


def naive_mean(aggregation: Aggregation, losses: list[list[float]], norm: int) -> float:
    """Over the samples that count, as in the papers."""
    losses = [loss for loss in losses if loss]
    if not losses:
        return 0.0
    match aggregation:
        case "token_mean":
            return sum(map(sum, losses)) / sum(map(len, losses))
        case "sequence_mean_token_mean":
            return sum(sum(loss) / len(loss) for loss in losses) / len(losses)
        case "sequence_mean_token_sum":
            return sum(map(sum, losses)) / len(losses)
        case "sequence_mean_token_sum_norm":
            return sum(sum(loss) / norm for loss in losses) / len(losses)


def test_token_weights_worked_by_hand() -> None:
    # Samples of 2, 0, 4 and 3 tokens, of which the last does not count: N = 2 with tokens, T = 6.
    lengths, valid = torch.tensor([2, 0, 4, 3]), torch.tensor([True, True, True, False])
    totals = totals_of(lengths, valid)
    assert totals == Denominators(num_episodes=2, num_tokens=6)
    expected = {
        "token_mean": [1 / 6] * 6,
        "sequence_mean_token_mean": [1 / 4] * 2 + [1 / 8] * 4,
        "sequence_mean_token_sum": [1 / 2] * 6,
        "sequence_mean_token_sum_norm": [1 / 20] * 6,
    }
    for aggregation in AGGREGATIONS:
        weights = token_weights(aggregation, lengths, valid, totals, norm_tokens=10)
        torch.testing.assert_close(weights, torch.tensor(expected[aggregation] + [0.0] * 3))


@given(samples=samples, norm=st.integers(1, 99))
def test_token_weights_sum_to_what_their_formulas_say(samples: list[tuple[int, bool]], norm: int) -> None:
    lengths, valid = (torch.tensor(part) for part in zip(*samples, strict=True))
    totals = totals_of(lengths, valid)
    any_token = float(totals.num_tokens > 0)
    tokens_per_sample = totals.num_tokens / max(totals.num_episodes, 1)
    expected = {
        "token_mean": any_token,
        "sequence_mean_token_mean": any_token,
        "sequence_mean_token_sum": tokens_per_sample,
        "sequence_mean_token_sum_norm": tokens_per_sample / norm,
    }
    for aggregation in AGGREGATIONS:
        weights = token_weights(aggregation, lengths, valid, totals, norm_tokens=norm)
        assert weights.dtype == torch.float32
        assert weights.sum().item() == pytest.approx(expected[aggregation], rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(samples=samples, parts=st.integers(1, 8), seed=st.integers(0, 99))
def test_the_aggregated_loss_does_not_depend_on_order_or_on_how_it_is_split(
    aggregation: Aggregation, samples: list[tuple[int, bool]], parts: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    lengths, valid = (torch.tensor(part) for part in zip(*samples, strict=True))
    losses = [torch.randn(length, dtype=torch.float64, generator=noise) for length, _ in samples]
    counted = [loss.tolist() for loss, (_, is_valid) in zip(losses, samples, strict=True) if is_valid]

    pieces = torch.tensor_split(torch.randperm(len(samples), generator=noise), parts)
    counts = torch.stack([Denominators.count(lengths[piece], valid[piece]) for piece in pieces]).sum(0)
    result = 0.0
    for piece in pieces:
        weights = token_weights(
            aggregation, lengths[piece], valid[piece], Denominators(*counts.tolist()), norm_tokens=5
        )
        values = torch.cat([torch.empty(0, dtype=torch.float64), *(losses[i] for i in piece.tolist())])
        result += (weights.double() * values).sum().item()
    assert result == pytest.approx(naive_mean(aggregation, counted, 5), abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3, 2]])
def test_a_batch_in_which_nothing_counts_has_no_weight(aggregation: Aggregation, lengths: list[int]) -> None:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    valid = torch.zeros(len(lengths), dtype=torch.bool)
    weights = token_weights(aggregation, sizes, valid, totals_of(sizes, valid), norm_tokens=4)
    assert weights.tolist() == [0.0] * sum(lengths)


def test_one_token_alone_has_weight_1() -> None:
    lengths, valid = torch.tensor([1]), torch.tensor([True])
    for aggregation in AGGREGATIONS:
        assert token_weights(aggregation, lengths, valid, totals_of(lengths, valid)).tolist() == [1.0]
