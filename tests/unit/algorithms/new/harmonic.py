"""An advantage in a file of its own, as a contributor would add it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import Groups

if TYPE_CHECKING:
    from leaderless.algorithms.settings import AlgorithmConfig


class HarmonicAdvantage(Advantage):
    """Rewards minus the power mean of their group, and half of that for cut responses.

    Formula: r - (mean |r|^power)^(1 / power), or half of it.

    Source: made for a test.
    """

    type: Literal["harmonic"] = "harmonic"
    power: float = Field(default=2.0, gt=0)
    """Exponent of the mean."""

    compares_siblings: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("truncated",)
    metrics: ClassVar[Mapping[str, str]] = {"harmonic/baseline": "mean baseline"}

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Refuse a mean over all tokens."""
        yield from super().refusals(algorithm)
        if algorithm.aggregation == "token_mean":
            yield "algorithm.aggregation=token_mean does not go with advantage.type=harmonic: use another aggregation"

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses."""
        powers = inputs.rewards.double().abs() ** self.power
        groups = Groups.of(powers, inputs.is_valid, inputs.group_ids)
        baseline = (groups.mean ** (1 / self.power))[groups.index]
        factor = torch.where(inputs.column("truncated"), 0.5, 1.0)
        advantages = groups.keep_signal(factor * (inputs.rewards - baseline))
        return AdvantageOutput(advantages, metrics={"harmonic/baseline": baseline})
