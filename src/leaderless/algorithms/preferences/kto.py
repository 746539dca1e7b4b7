"""KTO: gains and losses of single responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceLoss, PreferenceOutput, Preferences


class KtoLoss(PreferenceLoss):
    """Each response is a gain or a loss relative to the divergence of the policy from the reference.

    The divergence is estimated from responses of other rows, before each update and over all ranks. It has no gradient.

    Formula: w (1 - sigmoid(s (beta log r - z))), z = beta max(0, KL), with r the ratio of policy to reference; s is 1
    and w `desirable_weight` for a desirable response, -1 and `undesirable_weight` for another one.

    Source: KTO, arXiv 2402.01306, section 4.1, without its constant. The response that stands in for the policy's comes
    from the usable row before in the dataset, so that neither the order of training nor the number of ranks matters;
    its code takes one of the same batch.
    """

    type: Literal["kto"] = "kto"
    data: ClassVar[Preferences] = "singles"
    metrics: ClassVar[Mapping[str, str]] = {
        "divergence": "estimated divergence of the policy from the reference, at least 0"
    }
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable responses; all of them together should weigh 1 to 4/3 times as much as undesirable ones."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of undesirable responses."""

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        rewards = self.beta * inputs.first_ratio
        gain = rewards - self.beta * inputs.divergence.clamp(min=0)
        weights = rewards.new_tensor([self.undesirable_weight, self.desirable_weight])[inputs.is_desirable.long()]
        loss = weights * torch.where(inputs.is_desirable, -gain, gain).sigmoid()
        return PreferenceOutput(loss, rewards, torch.zeros_like(rewards))
