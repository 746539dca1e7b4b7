"""The loss of a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen

if TYPE_CHECKING:
    from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor, *, centering: float) -> Tensor:
    """[n] negative log-likelihood that the chosen of two responses is preferred, given the scores [n] of both.

    A chosen response is to be better by a margin, [n], at least. Only differences of scores matter; centering pulls the
    mean of both to 0.

    Formula: -log sigmoid(s_chosen - s_rejected - margin) + centering (s_chosen + s_rejected)^2.

    Source: InstructGPT, arXiv 2203.02155, equation 1, for single pairs; the margin as in Llama 2, arXiv 2307.09288,
    equation 2; centering as in Helping or Herding, arXiv 2312.09244, section 2.
    """
    chosen, rejected = widen(chosen), widen(rejected)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margins.to(chosen))
    return loss + centering * (chosen + rejected).square() if centering else loss
