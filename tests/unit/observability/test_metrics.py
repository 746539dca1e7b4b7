"""Numbers of a step: the reports of many ranks become that of one rank with all samples."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leaderless.observability.metrics import Largest, Mean, Metrics, Weights


class Alone:
    """A pool of one rank."""

    def sum(self, values: Tensor, _what: str) -> Tensor:
        return values

    def max(self, values: Tensor, _what: str) -> Tensor:
        return values


class Together:
    """One rank of a pool of threads."""

    def __init__(self, rank: int, shared: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.shared, self.barrier = rank, shared, barrier

    def sum(self, values: Tensor, _what: str) -> Tensor:
        return torch.stack(self._all(values)).sum(dim=0)

    def max(self, values: Tensor, _what: str) -> Tensor:
        return torch.stack(self._all(values)).amax(dim=0)

    def _all(self, values: Tensor) -> list[Tensor]:
        self.shared[self.rank] = values
        self.barrier.wait(10)
        everyone = list(self.shared)
        self.barrier.wait(10)
        return everyone


def reduce_on(num_ranks: int, report: Callable[[Metrics, int], None]) -> list[dict[str, float] | Exception]:
    """The result of each rank of a pool, or its error."""
    shared, barrier = [torch.empty(0)] * num_ranks, threading.Barrier(num_ranks)
    results: list[dict[str, float] | Exception] = [{}] * num_ranks

    def work(rank: int) -> None:
        metrics = Metrics()
        report(metrics, rank)
        try:
            results[rank] = metrics.reduce(Together(rank, shared, barrier))
        except (RuntimeError, threading.BrokenBarrierError) as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


VALUES = [1.0, 5.0, 2.0, 2.0, 10.0, -4.0, 0.5]


@pytest.mark.parametrize("shares", [[7], [4, 3], [1, 0, 5, 1]])
def test_numbers_do_not_depend_on_how_values_lie_on_ranks(shares: list[int]) -> None:
    def report(metrics: Metrics, rank: int) -> None:
        mine = torch.tensor(VALUES[sum(shares[:rank]) : sum(shares[: rank + 1])])
        for value in mine:
            metrics.mean("mean", value, 1)
            metrics.total("total", value)
            metrics.max("max", value)
        metrics.mean("mean", 0.0, 0)
        metrics.total("total", 0)
        metrics.max("max", -math.inf)
        metrics.spread("spread", mine)
        metrics.mean("of nothing", 0.0, 0)
        metrics.spread("no values", mine[:0])

    # The order of names must be the same on every rank, also on ranks without values.
    def in_order(metrics: Metrics, rank: int) -> None:
        metrics.mean("mean", 0.0, 0)
        metrics.total("total", 0)
        metrics.max("max", -math.inf)
        report(metrics, rank)

    mean = sum(VALUES) / 7
    std = math.sqrt(sum((value - mean) ** 2 for value in VALUES) / 7)
    expected = {"mean": mean, "total": sum(VALUES), "max": 10.0, "spread/mean": mean, "spread/std": std}
    for numbers in reduce_on(len(shares), in_order):
        assert numbers == pytest.approx(expected), "a mean of nothing is left out"


def test_means_and_totals_by_hand() -> None:
    metrics = Metrics()
    metrics.mean("rate", 3.0, 4)
    metrics.mean("rate", torch.tensor(1.0), torch.tensor(4))
    metrics.total("count", 2)
    metrics.total("count", torch.tensor(5.0))
    metrics.spread("reward", torch.tensor([[1.0, 3.0]]))
    metrics.max("step", 0.1)
    numbers = metrics.reduce(Alone())
    assert numbers == {"rate": 0.5, "count": 7.0, "reward/mean": 2.0, "reward/std": 1.0, "step": 0.1}
    assert Metrics().reduce(Alone()) == {}


def test_a_number_that_is_not_finite_stays_visible() -> None:
    metrics = Metrics()
    metrics.max("norm", 1.0)
    metrics.max("norm", float("nan"))
    metrics.mean("loss", torch.tensor(float("inf")), 1)
    numbers = metrics.reduce(Alone())
    assert math.isnan(numbers["norm"])
    assert numbers["loss"] == math.inf


def test_ranks_that_report_other_names_fail_together_instead_of_mixing_numbers() -> None:
    def report(metrics: Metrics, rank: int) -> None:
        metrics.total("a", 1)
        metrics.total("b" if rank else "c", 1)

    first, second = reduce_on(2, report)
    assert "ranks of one pool report different metrics" in str(first)
    assert "total c" in str(first)
    assert "total b" in str(second)


def test_shares_that_a_loss_returns_add_up_in_their_order() -> None:
    metrics, expected = Metrics(), Metrics()
    values = torch.randn(64, requires_grad=True)
    for value in values * 1e-3:
        metrics.add({"mean": Mean(value, 1).detach(), "most": Largest(value).detach()})
        expected.mean("mean", value.detach(), 1)
        expected.max("most", value.detach())
    assert metrics.reduce(Alone()) == expected.reduce(Alone())
    assert not Mean(values.sum(), 1).detach().total.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_effective_sample_size_is_that_of_all_ranks(num_ranks: int) -> None:
    # Weights 1, 3 and 2 that count: (1 + 3 + 2)^2 / (3 (1 + 9 + 4)).
    weights, is_counted = torch.tensor([1.0, 3.0, 9.0, 2.0]), torch.tensor([True, True, False, True])

    def report(metrics: Metrics, rank: int) -> None:
        metrics.add({"samples": Weights.of(weights[rank::num_ranks], is_counted[rank::num_ranks])})

    assert reduce_on(num_ranks, report) == [{"samples": pytest.approx(36 / 42)}] * num_ranks


def test_weights_of_nothing_have_no_effective_sample_size() -> None:
    metrics = Metrics()
    metrics.add({"samples": Weights.of(torch.tensor([1.0]), torch.tensor([False]))})
    assert metrics.reduce(Alone()) == {}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_digest_is_the_exact_sum_of_large_numbers(num_ranks: int) -> None:
    values = [(1 << 120) - 1 - 7 * rank for rank in range(num_ranks)]
    for numbers in reduce_on(num_ranks, lambda metrics, rank: metrics.digest("digest", values[rank])):
        assert isinstance(numbers, dict)
        assert numbers["digest"] == sum(values) % (1 << 120)
