"""Reactions to bad numbers in training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.config.base import Section

GuardAction = Literal["warn", "skip", "roll_back", "stop"]
"""Actions from the mildest to the strongest; if several guards are violated in a step, the strongest is taken."""


class GuardsConfig(Section):
    """Reactions to bad numbers.

    `warn` continues; `skip` leaves out the update on all ranks and continues; `roll_back` returns to the newest
    checkpoint and skips the prompts used since then; `stop` ends the run and keeps its last checkpoint.
    """

    non_finite_loss: GuardAction = "skip"
    """Action if the loss of an update is NaN or infinite on any rank."""
    non_finite_gradient: Literal["skip", "roll_back", "stop"] = "skip"
    """Action if the norm of the gradient is NaN or infinite; such a gradient never reaches the weights."""
    max_skips: int = Field(default=10, ge=0)
    """Number of updates of a node that may be skipped in a row; one more stops the run."""
    grad_norm_limit: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient before clipping; null for no limit."""
    grad_norm_factor: float | None = Field(default=None, gt=1)
    """Largest norm as a multiple of the median over the node's last 50 updates, from the sixth update on; null for no
    limit."""
    grad_norm_action: GuardAction = "skip"
    """Action if the norm is above one of these limits."""
    entropy_limit: float | None = Field(default=None, gt=0)
    """Smallest mean entropy of the policy over the tokens of an update, in nats; null for no limit."""
    entropy_action: GuardAction = "warn"
    """Action if the entropy is below the limit."""
    reward_failures_limit: float | None = Field(default=0.5, ge=0, lt=1)
    """Largest share of a step's responses whose reward may fail; null for no limit."""
    reward_failures_action: Literal["warn", "roll_back", "stop"] = "stop"
    """Action at the end of a step in which more rewards failed."""
    max_roll_backs: int = Field(default=3, ge=1)
    """Number of times that a run may roll back; then it stops instead."""
