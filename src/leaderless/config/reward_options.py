"""Settings that all rewards have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from leaderless.base.section import ShorthandSection

DEFAULT_SOURCE = "default"
"""Among the sources of a reward: all that no reward names."""


class RewardOptions(ShorthandSection):
    """Settings of every reward; a bare number is its weight."""

    shorthand: ClassVar[str] = "weight"

    weight: float = 1.0
    """Weight in the sample's reward, which is the weighted sum over the rewards that apply to it."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that grading one response may take; after that its process is ended and the reward counts as failed."""
    sources: tuple[str, ...] = ()
    """Sources of rows that the reward applies to (`data.train.source` names the column; without one, the source of a
    mixture's row is the name of its dataset); `default` stands for sources that no reward names. Empty for all."""
