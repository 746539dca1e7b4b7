"""Metrics that nodes report: collected on each rank, and reduced over all ranks once per step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol, Self

import torch
from torch import Tensor


class Reducer(Protocol):
    """Ranks that can reduce numbers together."""

    def sum(self, values: Tensor, what: str) -> Tensor:
        """The sum over all ranks."""

    def max(self, values: Tensor, what: str) -> Tensor:
        """The largest value over all ranks."""


@dataclass(frozen=True)
class _Share:
    def detach(self) -> Self:
        """The same without a graph for the backward pass."""
        values = (getattr(self, one.name) for one in fields(self))
        return type(self)(*(value.detach() if isinstance(value, Tensor) else value for value in values))


@dataclass(frozen=True)
class Mean(_Share):
    """A share of a mean over all ranks."""

    total: float | Tensor  # sum of some values
    count: float | Tensor  # number of these values


@dataclass(frozen=True)
class Largest(_Share):
    """A value whose maximum over all ranks is reported."""

    value: float | Tensor


@dataclass(frozen=True)
class Weights(_Share):
    """A share of an effective sample size: the equivalent number of equal weights, as a share of their number."""

    total: float | Tensor  # sum of some weights
    square: float | Tensor  # sum of their squares
    count: float | Tensor  # number of these weights

    @classmethod
    def of(cls, values: Tensor, is_counted: Tensor) -> Weights:
        """The share of the weights that count."""
        counted = torch.where(is_counted, values.detach(), 0)
        return cls(counted.sum(), counted.square().sum(), is_counted.sum())


Share = Mean | Largest | Weights
"""A rank's contribution to a metric."""


LIMB_BITS = 40
"""Bits of each of the three parts of a digest; up to 8,192 ranks can add such parts up exactly in float64."""


@dataclass
class _Measure:
    """A metric that is being collected; tensors stay on their device until the step ends, so nothing waits."""

    kind: Literal["mean", "total", "spread", "max", "effective", "digest"]
    count: float | Tensor = 0.0
    total: float | Tensor = 0.0
    square: float | Tensor = 0.0
    largest: float | Tensor = -torch.inf


@dataclass
class Metrics:
    """One rank's metrics of a step. All ranks of a pool report the same names in the same order."""

    _measures: dict[str, _Measure] = field(default_factory=dict)
    _name: Callable[[str], str] = field(default=str)

    def named(self, name: Callable[[str], str]) -> Metrics:
        """The same metrics for a node whose metrics have longer names, such as for one of several roles."""
        return replace(self, _name=name)

    def mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add to a mean over all ranks, such as `rollout/truncated`, the sum of this rank's values and their number."""
        measure = self._measures.setdefault(self._name(name), _Measure("mean"))
        measure.total = measure.total + total
        measure.count = measure.count + count

    def total(self, name: str, value: float | Tensor) -> None:
        """Add the share of this rank to a sum over all, such as `reward/failed`."""
        measure = self._measures.setdefault(self._name(name), _Measure("total"))
        measure.total = measure.total + value

    def spread(self, name: str, values: Tensor) -> None:
        """Report mean and standard deviation over all ranks' values, of any shape, as `name/mean` and `name/std`."""
        measure = self._measures.setdefault(self._name(f"{name}/*"), _Measure("spread"))
        values = values.double().flatten()
        measure.count = measure.count + values.numel()
        measure.total = measure.total + values.sum()
        measure.square = measure.square + values.square().sum()

    def max(self, name: str, value: float | Tensor) -> None:
        """Report the largest value over all ranks, or one that is the same on all, such as `policy/learning_rate`."""
        measure = self._measures.setdefault(self._name(name), _Measure("max"))
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64)
        measure.largest = torch.maximum(torch.as_tensor(measure.largest), value)

    def effective(self, name: str, weights: Weights) -> None:
        """Add to the effective sample size of weights on all ranks: (sum w)^2 / sum w^2, as a share of their number."""
        measure = self._measures.setdefault(self._name(name), _Measure("effective"))
        measure.count = measure.count + weights.count
        measure.total = measure.total + weights.total
        measure.square = measure.square + weights.square

    def digest(self, name: str, value: int) -> None:
        """Report a number modulo 2^120 whose sum over all ranks, modulo the same, is exact; once for each name."""
        low, middle, high = (value >> place & ((1 << LIMB_BITS) - 1) for place in range(0, 3 * LIMB_BITS, LIMB_BITS))
        self._measures[self._name(name)] = _Measure("digest", float(low), float(middle), float(high))

    def add(self, shares: Mapping[str, Share]) -> None:
        """Add metrics returned by a function for its caller to report, by name."""
        for name, share in shares.items():
            match share:
                case Mean():
                    self.mean(name, share.total, share.count)
                case Largest():
                    self.max(name, share.value)
                case Weights():
                    self.effective(name, share)

    def reduce(self, process_group: Reducer) -> dict[str, float]:
        """The numbers over all ranks of a pool, which call this together; means of nothing are left out.

        A RuntimeError is raised where ranks report different names.
        """
        names = "\n".join(f"{measure.kind} {name}" for name, measure in self._measures.items())
        digest = float(zlib.crc32(names.encode()))
        largest = [float(measure.largest) for measure in self._measures.values()]
        agreed = process_group.max(torch.tensor([digest, -digest, *largest], dtype=torch.float64), "metrics")
        if agreed[0] != -agreed[1]:
            raise RuntimeError(f"ranks of one pool report different metrics; this one reports:\n{names}")
        sums = [[float(m.count), float(m.total), float(m.square)] for m in self._measures.values()]
        sums = process_group.sum(torch.tensor(sums, dtype=torch.float64).reshape(-1, 3), "metrics").tolist()
        numbers: dict[str, float] = {}
        for (name, measure), (count, total, square), most in zip(
            self._measures.items(), sums, agreed[2:].tolist(), strict=True
        ):
            if measure.kind == "max":
                numbers[name] = most
            elif measure.kind == "total":
                numbers[name] = total
            elif measure.kind == "digest":
                limbs = enumerate((count, total, square))
                numbers[name] = sum(int(limb) << LIMB_BITS * place for place, limb in limbs) % (1 << 3 * LIMB_BITS)
            elif count > 0 and measure.kind == "mean":
                numbers[name] = total / count
            elif measure.kind == "effective":
                if square > 0:
                    numbers[name] = total**2 / (count * square)
            elif count > 0:
                numbers[name.replace("*", "mean")] = total / count
                numbers[name.replace("*", "std")] = max(0.0, square / count - (total / count) ** 2) ** 0.5
        return numbers
