"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from typing import Literal

from leaderless.algorithms.packed import widen
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss


class ReinforceLoss(PolicyLoss):
    """The plain policy gradient, without ratio or clipping.

    Formula: -A log p.

    Source: Williams, "Simple statistical gradient-following algorithms", 1992; GPG, arXiv 2504.02546, uses it too.
    """

    type: Literal["reinforce"] = "reinforce"

    def compute(self, inputs: LossInputs) -> LossOutput:
        return LossOutput.without_clipping(-inputs.advantages * widen(inputs.log_probs))
