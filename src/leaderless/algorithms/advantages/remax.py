"""ReMax: the greedy response as a baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch


class RemaxAdvantage(Advantage):
    """Rewards minus the reward of the greedy response to the same prompt.

    The advantage is 0 where either reward failed.

    Formula: r - r_greedy.

    Source: ReMax, arXiv 2310.10505. No group is needed: one sampled response per prompt is enough.
    """

    type: Literal["remax"] = "remax"

    reads: ClassVar[tuple[str, ...]] = ("is_greedy",)
    stage: ClassVar[str] = "remax"

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses, greedy ones included."""
        is_greedy, group_ids, is_valid = inputs.column("is_greedy"), inputs.group_ids, inputs.is_valid
        order = torch.argsort(group_ids[is_greedy])
        place = order[torch.searchsorted(group_ids[is_greedy][order], group_ids)]
        difference = inputs.rewards.double() - inputs.rewards[is_greedy][place].double()
        return AdvantageOutput(torch.where(is_valid & is_valid[is_greedy][place], difference, 0.0).float())
