"""Metrics of the loads of experts, worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.engines import ALONE
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.observability.metrics import Metrics
from leaderless.stages.context import StageContext
from leaderless.stages.mini_batches import report_expert_loads
from leaderless.training.engine import Trainable


class Loaded:
    """An engine that knows its loads."""

    def __init__(self, loads: Tensor | None) -> None:
        self._loads = loads

    def expert_loads(self) -> Tensor | None:
        return self._loads

    def balance_experts(self, batch: Batch, coefficient: float) -> None:
        """Nothing here is balanced."""


def reported(engine: object) -> dict[str, float]:
    """What is reported of one update of a critic."""
    node = SimpleNamespace(node=SimpleNamespace(role="critic"))
    context = SimpleNamespace(metrics=Metrics(), node=node)
    report_expert_loads(cast("Trainable", engine), cast("StageContext", context))
    return context.metrics.reduce(ALONE)


def numbers_of(counts: list[list[float]], sums: list[list[float]]) -> tuple[float, float, float]:
    """Entropy, peak and balance of the choices and the probabilities of each layer's experts."""
    numbers = reported(Loaded(torch.tensor([counts, sums])))
    assert numbers.keys() == {f"critic/expert_{name}" for name in ("entropy", "peak", "balance")}
    return numbers["critic/expert_entropy"], numbers["critic/expert_peak"], numbers["critic/expert_balance"]


def test_equal_loads_are_one_however_many_they_are() -> None:
    for num_experts, tokens in ((1, 7), (2, 1), (4, 5), (128, 3)):
        loads = [[float(tokens)] * num_experts]
        entropy, peak, balance = numbers_of(loads, loads)
        assert (peak, balance) == pytest.approx((1, 1))
        assert entropy == pytest.approx(float(num_experts > 1))


def test_loads_of_one_expert_have_no_entropy() -> None:
    assert numbers_of([[0, 9, 0, 0]], [[0, 4.5, 0, 0]]) == pytest.approx((0, 4, 4))


def test_uneven_loads_have_the_values_of_the_formulas() -> None:
    # Shares 1/2, 1/4, 1/4, 0 have log 2 + (log 2) / 2 nats, of at most log 4 = 2 log 2.
    entropy, peak, balance = numbers_of([[4, 2, 2, 0]], [[1, 2, 1, 4]])
    assert entropy == pytest.approx((1 / 2 * math.log(2) + 2 / 4 * math.log(4)) / math.log(4)) == 0.75
    assert peak == pytest.approx(4 * 1 / 2)
    assert balance == pytest.approx(4 * (1 / 2 * 1 / 8 + 1 / 4 * 2 / 8 + 1 / 4 * 1 / 8))


def test_layers_count_alike_whatever_their_tokens() -> None:
    """A mean over layers, as of two models of one layer each: not over all choices together."""
    layers = ([4.0, 2, 2, 0], [1.0, 2, 1, 4]), ([300.0, 0, 0, 100], [30.0, 0, 30, 40])
    alone = [numbers_of([counts], [sums]) for counts, sums in layers]
    together = numbers_of(*(list(one) for one in zip(*layers, strict=True)))
    assert together == pytest.approx([(one + other) / 2 for one, other in zip(*alone, strict=True)])
    assert alone[1][1] == pytest.approx(3)


@pytest.mark.parametrize(
    "engine",
    [object(), Loaded(None), Loaded(torch.zeros(2, 3, 4))],
    ids=["another engine", "no known experts", "no tokens"],
)
def test_nothing_is_reported_of_a_model_without_experts_or_an_update_without_tokens(engine: object) -> None:
    assert reported(engine) == {}
