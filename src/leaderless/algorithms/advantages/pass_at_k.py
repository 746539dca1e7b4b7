"""Pass@k training: a set of responses is as good as its best one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import Groups
from leaderless.base.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.algorithm import CheckedRecipe


class PassAtKAdvantage(Advantage):
    """Contribution of a response to the best of k, averaged over all sets of k.

    Formula: (1 - p) / s for a correct response and (1 - p - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / s for a wrong one,
    with p = 1 - C(wrong, k) / C(n, k) and s = sqrt(p (1 - p)).

    Source: Pass@k Training, arXiv 2508.10751, analytical derivation. A group has no signal if it has fewer than k
    rewards, or if every set of k holds a correct response.
    """

    type: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=4, ge=1)
    """Number of responses of which the best counts; at most `batch.responses_per_prompt`."""
    correct_at: float = 1.0
    """Reward from which a response counts as correct."""

    compares_siblings: ClassVar[bool] = True
    judges: ClassVar[str] = "asks whether a response is correct"

    def check(self, recipe: CheckedRecipe) -> None:
        """Refuse a k for which a group has too few responses."""
        super().check(recipe)
        siblings = recipe.batch.responses_per_prompt
        if self.k > siblings:
            raise RecipeError.at(
                "algorithm.advantage.k",
                f"is {self.k}, but a group has {siblings} responses (batch.responses_per_prompt): lower the one or "
                "raise the other",
            )

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        is_correct = (inputs.rewards >= self.correct_at).double()
        groups, k = Groups.of(is_correct, inputs.is_valid, inputs.group_ids), self.k
        wrong = groups.count - groups.sum(groups.values)
        all_wrong = _ratio_of_binomials(wrong, groups.count, k)
        deviation = (all_wrong * (1 - all_wrong)).sqrt()
        for_wrong = all_wrong - _ratio_of_binomials(wrong - 1, groups.count - 1, k - 1)
        advantages = torch.where(groups.values > 0, all_wrong[groups.index], for_wrong[groups.index])
        has_deviation = (deviation > 0)[groups.index]
        divided = torch.where(has_deviation, advantages / deviation[groups.index], 0.0)
        return AdvantageOutput(groups.keep_signal(divided))


def _ratio_of_binomials(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """C(top, k) / C(bottom, k) where top <= bottom; 0 where top < k."""
    ratio = torch.ones_like(top)
    for i in range(k):
        ratio = ratio * (top - i).clamp(min=0) / (bottom - i).clamp(min=1)
    return ratio
