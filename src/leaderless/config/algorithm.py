"""The numbers of the algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.config.base import Section


class AdvantageConfig(Section):
    """How rewards of a group become advantages."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation, as GRPO does."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to that standard deviation."""


class PolicyLossConfig(Section):
    """The clipped ratio objective."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""


class KlConfig(Section):
    """The KL penalty towards the reference, in the loss."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0 prunes the reference from the plan."""


class AlgorithmConfig(Section):
    """Advantage, loss, penalty and how tokens are averaged."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Group-relative advantages."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The clipped ratio objective."""
    kl: KlConfig = KlConfig()
    """The KL penalty."""
    aggregation: Literal["sequence_mean_token_mean", "token_mean"] = "sequence_mean_token_mean"
    """Mean over the tokens of a sample and then over samples (GRPO), or over all tokens alike (DAPO)."""
