"""TOPR: bad responses count less as they become unlikely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from leaderless.algorithms.correction import CorrectionLevel, importance_ratios
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen
from leaderless.algorithms.policy_loss import BehaviorLoss, LossInputs, LossOutput


class ToprLoss(BehaviorLoss):
    """The policy gradient, in which bad responses count less as they become unlikely.

    Good responses have weight 1, however unlikely they have become. The weight of a bad one is its ratio to the policy
    that sampled it, at most 1, so that samples of any age cannot push its probability down without end.

    Formula: -a A log p, with a = 1 if A >= 0, else sg[min(w, 1)], and w the ratio of the response.

    Source: TOPR, arXiv 2503.14286, the definition of its gradient, where w is that of the whole response: the product
    of its tokens' ratios. The paper has rewards of either sign in place of advantages. Its objective sums over the
    tokens of a response: `aggregation: sequence_mean_token_sum`. Two deviations: log w is cut at +-20, and each sample
    of an episode is judged by itself.
    """

    type: Literal["topr"] = "topr"
    level: CorrectionLevel = "sequence"
    """Ratio of a response: the product over its tokens (`sequence`), as in the paper, or its geometric mean
    (`geometric`), as proposed for verl; or of each token by itself (`token`), as in Trinity-RFT."""

    metrics: ClassVar[Mapping[str, str]] = {"taper": "mean weight of a token, below 1 only where A < 0"}

    def compute(self, inputs: LossInputs) -> LossOutput:
        rollout, is_bad = inputs.columns["rollout_log_probs"], inputs.advantages < 0
        ratios = importance_ratios(inputs.log_probs, rollout, inputs.lengths, self.level)
        weight = torch.where(is_bad, ratios.clamp(max=1.0), 1.0)
        loss = -weight * inputs.advantages * widen(inputs.log_probs)
        return LossOutput(loss, is_bad & (ratios > 1), {"taper": weight})
