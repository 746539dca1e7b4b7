"""GDPO: each reward relative to its group on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import Groups
from leaderless.algorithms.returns import Moments

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference of a reward from the sum of its parts, relative to their size."""


class GdpoAdvantage(Advantage):
    """Each of several rewards relative to its group, added up by weight, over the deviation of all responses.

    Rewards with little variance in a group count as much as others of the same weight, and combinations of rewards that
    have the same sum are distinguished.

    Formula: S / (std(S) + epsilon) with S the sum over rewards k of w_k (r_k - mean_k) / (std_k + epsilon); mean_k and
    std_k are of the group, std(S) of all responses of the step.

    Source: GDPO, arXiv 2601.05242, with the weights of its weighted sum. Standard deviations are the samples' (n - 1).
    Deviations: S is not centered, as its mean is 0 in each group; a reward that is equal for all of a group adds 0;
    failed rewards are left out, of the group and of std(S). A single reward gives GRPO but for the last division.
    """

    type: Literal["gdpo"] = "gdpo"
    normalize_over_step: bool = True
    """Divide by the standard deviation over all responses of the step; without it, one reward of weight 1 is GRPO."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Constant added to standard deviations."""

    reads: ClassVar[tuple[str, ...]] = ("reward_details",)
    compares_siblings: ClassVar[bool] = True
    judges: ClassVar[str] = "normalizes each reward on its own"

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        total = torch.zeros(len(inputs.rewards), dtype=torch.float64)
        for name, (values, has) in reward_parts(inputs).items():
            groups = Groups.of(values, has, inputs.group_ids)
            normalized = groups.centered() / (groups.std() + self.epsilon)[groups.index]
            has_signal = has & groups.has_signal[groups.index]
            total = total + inputs.reward_weights[name] * torch.where(has_signal, normalized, 0.0)
        if self.normalize_over_step:
            moments = Moments.of(inputs.sum_over_ranks(Moments.count(total, inputs.is_valid)))
            total = total / (moments.std + self.epsilon)
        return AdvantageOutput(torch.where(inputs.is_valid, total, 0.0).float())


def reward_parts(inputs: AdvantageInputs) -> dict[str, tuple[Tensor, Tensor]]:
    """The rewards that each response's reward is the sum of: values, [n], and where there is one, [n] bool, by name.

    Raises:
        ValueError: A reward is not that sum, as another stage has changed it.
    """
    details, parts = inputs.columns["reward_details"], {}
    is_valid = inputs.is_valid.tolist()
    for name in inputs.reward_weights:
        found = [_value(detail, name) if valid else None for detail, valid in zip(details, is_valid, strict=True)]
        values = torch.tensor([value or 0.0 for value in found], dtype=torch.float64)
        parts[name] = values, torch.tensor([value is not None for value in found], dtype=torch.bool)
    weighted = [inputs.reward_weights[name] * values for name, (values, _) in parts.items()]
    total = sum(weighted, torch.zeros(len(is_valid), dtype=torch.float64))
    size = sum((one.abs() for one in weighted), torch.ones(len(is_valid), dtype=torch.float64))
    differs = inputs.is_valid & ((inputs.rewards.double() - total).abs() > TOLERANCE * size)
    if bool(differs.any()):
        place = int(differs.nonzero()[0])
        raise ValueError(
            f"a response of group {int(inputs.group_ids[place])} has the reward {float(inputs.rewards[place]):g}, but "
            f"its rewards ({', '.join(parts)}) sum to {float(total[place]):g}: advantage.type=gdpo normalizes each of "
            "them, so no stage may change their sum; make what it adds a reward, or use advantage.type=grpo"
        )
    return parts


def _value(detail: object, name: str) -> float | None:
    found = detail.get(name) if isinstance(detail, Mapping) else None
    value = found.get("value") if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) else None
