"""How much data makes a step."""

from __future__ import annotations

from pydantic import Field

from leaderless.config.base import Section

MAX_RESPONSES = 1 << 16
"""Siblings that the id of a sample has room for."""


class BatchConfig(Section):
    """The one vocabulary of batch sizes; everything else is derived from it and shown by `leaderless plan`."""

    prompts_per_step: int = Field(default=128, ge=1)
    """Prompts (for supervised fine-tuning: rows) taken from the data in each step, over all ranks."""
    responses_per_prompt: int = Field(default=8, ge=1, le=MAX_RESPONSES)
    """Responses sampled for each prompt: the group."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser steps made from one step's samples."""
    windows_per_step: int = Field(default=1, ge=1)
    """Into how many parts each rank's prompts of a step are divided on their way through nodes on different ranks that
    need not see all rows at once (rollout, rewards, log-probs): while one part is sampled, the one before is on its way
    or already scored. Changes nothing where no rows change ranks between such nodes."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens in one forward and backward pass of a rank: a memory bound that changes no number."""
