"""Rejection-sampling fine-tuning: correct responses are imitated."""

from __future__ import annotations

from typing import ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch


class RejectionAdvantage(Advantage):
    """1 for correct responses, 0 for all others, scaled so that a mean over all is a mean over the correct ones.

    With the plain policy gradient, the aggregation `token_mean` and a share of tokens, this is fine-tuning on the
    model's own correct responses. The share is of the tokens of all responses that count, on all ranks.

    Formula: A = [correct] / correct_share.

    Source: rejection-sampling fine-tuning, arXiv 2308.01825; RAFT, arXiv 2304.06767.
    """

    type: Literal["rejection"] = "rejection"
    correct_at: float = 1.0
    """Reward from which a response counts as correct."""

    judges: ClassVar[str] = "asks whether a response is correct"

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        # The same tokens count here as in the mean of the update.
        is_correct, counted = inputs.rewards >= self.correct_at, inputs.lengths * inputs.is_trained
        tokens = inputs.sum_over_ranks(torch.stack([(counted * is_correct).sum(), counted.sum()]).double())
        share = float(tokens[0] / tokens[1].clamp(min=1))
        return AdvantageOutput((is_correct & inputs.is_valid).float() / max(share, 1e-12))
