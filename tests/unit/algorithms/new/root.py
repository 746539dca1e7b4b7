"""A policy loss in a file of its own, as a contributor would add it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.packed import log_ratio_of
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss

if TYPE_CHECKING:
    from leaderless.algorithms.settings import AlgorithmConfig


class RootLoss(PolicyLoss):
    """The surrogate of a root of the ratio, weaker for rewarded responses.

    Formula: -root ratio^(1 / root) A / (1 + r).

    Source: made for a test.
    """

    type: Literal["root"] = "root"
    root: float = Field(default=2.0, ge=1)
    """Root of the ratio."""

    reads: ClassVar[tuple[str, ...]] = ("rewards",)
    metrics: ClassVar[Mapping[str, str]] = {"root": "mean root of the ratio"}

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Refuse another advantage of one value for each token."""
        yield from super().refusals(algorithm)
        if algorithm.advantage.is_per_token:
            yield f"algorithm.advantage.type={algorithm.advantage.type} does not go with policy_loss.type=root: use ppo"

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of each token of a micro-batch."""
        root = (log_ratio_of(inputs.log_probs, inputs.old_log_probs) / self.root).exp()
        loss = -self.root * root * inputs.advantages / (1 + inputs.columns["rewards"])
        return LossOutput.without_clipping(loss, {"root": root.detach()})
