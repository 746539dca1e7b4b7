"""How much data makes a step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from leaderless.config.base import Section

MAX_RESPONSES = 1 << 16
"""Largest number of siblings in the id of a sample."""
FIRST_MICRO_BATCH_TOKENS = 16384
"""What `micro_batch_tokens: auto` begins with where memory is large, unless a sample may be longer."""


class BatchConfig(Section):
    """Batch sizes; all other sizes are derived from these and shown by `leaderless plan`."""

    prompts_per_step: int = Field(default=128, ge=1)
    """Prompts (for supervised fine-tuning: rows) per step, over all ranks."""
    responses_per_prompt: int = Field(default=8, ge=1, le=MAX_RESPONSES)
    """Responses sampled for each prompt: the group."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates made from one step's samples."""
    windows_per_step: int = Field(default=1, ge=1)
    """Into how many parts each rank's prompts of a step are divided on their way through nodes on different ranks that
    need not see all rows at once (rollout, rewards, log-probs): while one part is sampled, the one before is on its way
    or already scored. Changes nothing where no rows change ranks between such nodes."""
    micro_batch_tokens: int | Literal["auto"] = 16384
    """Most tokens in one forward and backward pass of a rank, at least 1: a memory bound that changes no number. A
    prompt counts once for all of its responses in the pass. `auto` begins with 16,384, or with the longest sample if
    that is longer, halved until the plan's estimate fits into the memory there is, and halves it again whenever memory
    runs out."""

    @field_validator("micro_batch_tokens", mode="before")
    @classmethod
    def _is_bound_or_auto(cls, value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be a whole number of at least 1, or auto")

    def first_micro_batch_tokens(self, longest_tokens: int) -> int:
        """The bound that a run begins with.

        Args:
            longest_tokens: Length of the longest sample.
        """
        if self.micro_batch_tokens == "auto":
            return max(FIRST_MICRO_BATCH_TOKENS, longest_tokens)
        return self.micro_batch_tokens
