"""What happens when the numbers of training go bad."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.config.base import Section

GuardAction = Literal["warn", "skip", "roll_back", "stop"]
"""From the mildest to the strongest; where several guards of a step speak, the strongest is taken."""


class GuardsConfig(Section):
    """What happens when numbers go bad.

    `warn` goes on; `skip` leaves the update out on all ranks and goes on; `roll_back` returns to the newest checkpoint
    and passes over the prompts that were used since; `stop` ends the run, whose last checkpoint stays.
    """

    non_finite_loss: GuardAction = "skip"
    """When the loss of an update is NaN or infinite on any rank."""
    non_finite_gradient: Literal["skip", "roll_back", "stop"] = "skip"
    """When the norm of the gradient is NaN or infinite; it never reaches the weights."""
    max_skips: int = Field(default=10, ge=0)
    """Updates of a node that may be skipped one after the other; the next one stops the run."""
    grad_norm_limit: float | None = Field(default=None, gt=0)
    """Highest norm of the gradient, before clipping; null for none."""
    grad_norm_factor: float | None = Field(default=None, gt=1)
    """Highest norm as a multiple of the median of the node's last 50 updates, from the sixth update on; null for
    none."""
    grad_norm_action: GuardAction = "skip"
    """When the norm is above one of these two."""
    entropy_limit: float | None = Field(default=None, gt=0)
    """Lowest mean entropy of the policy over the tokens of an update, in nats; null for none."""
    entropy_action: GuardAction = "warn"
    """When the entropy is below it."""
    reward_failures_limit: float | None = Field(default=0.5, ge=0, lt=1)
    """Largest share of a step's responses whose reward may fail; null for none."""
    reward_failures_action: Literal["warn", "roll_back", "stop"] = "stop"
    """When more fail, at the end of that step."""
    max_roll_backs: int = Field(default=3, ge=1)
    """How often a run may roll back; the next time it stops."""
