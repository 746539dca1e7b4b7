"""The units of decisions: what has a log-probability of its own, in the place of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.config.environment import Grain
from leaderless.data.batch import ragged_index


@dataclass(frozen=True)
class DecisionUnits:
    """The units of N decisions in some episodes, of which each executed some of its steps.

    Steps that were not executed have no units: the end of an episode cuts its last decision.

    Attributes:
        grain: Kind of unit: a number, an action or a chunk.
        lengths: [episodes] int64, number of units of each.
        decisions: [R] int64, the decision of each unit, counted over all episodes.
        turns: [R] int64, the same, counted in its episode.
        places: [R] int64, place of each unit in its decision; of a whole chunk, the number of executed steps.
        steps: [R] int64, the step that each is for, or that a chunk ends with, counted in its episode.
        is_last: [R] bool, whether it is the last of its step or chunk.
    """

    grain: Grain
    lengths: Tensor
    decisions: Tensor
    turns: Tensor
    places: Tensor
    steps: Tensor
    is_last: Tensor

    @classmethod
    def of(cls, grain: Grain, executed: Sequence[Sequence[int]], numbers: int) -> DecisionUnits:
        """Lay out the units of the executed steps of each decision of each episode."""
        counts = torch.tensor([count for row in executed for count in row], dtype=torch.int64)
        num_decisions = torch.tensor([len(row) for row in executed], dtype=torch.int64)
        sizes = {"token": counts * numbers, "action": counts, "chunk": torch.ones_like(counts)}[grain]
        decisions = torch.arange(len(counts)).repeat_interleave(sizes)
        within = ragged_index(torch.zeros_like(sizes), sizes)
        turns = ragged_index(torch.zeros_like(num_decisions), num_decisions)[decisions]
        before = counts.cumsum(0) - counts
        first = (num_decisions.cumsum(0) - num_decisions).repeat_interleave(num_decisions)
        before = before - before[first] if len(before) else before
        steps = (
            before[decisions] + {"token": within // numbers, "action": within, "chunk": counts[decisions] - 1}[grain]
        )
        episodes = torch.arange(len(num_decisions)).repeat_interleave(num_decisions)
        lengths = torch.zeros_like(num_decisions).index_add_(0, episodes, sizes)
        is_last = within % numbers == numbers - 1 if grain == "token" else torch.ones_like(within, dtype=torch.bool)
        places = counts[decisions] if grain == "chunk" else within
        return cls(grain, lengths, decisions, turns, places, steps, is_last)

    def rewards(self, by_step: Tensor, num_steps: Tensor) -> Tensor:
        """Rewards of units, [R] float32: each step's at its last unit, a chunk's together.

        Args:
            by_step: [steps] float32, rewards of all episodes.
            num_steps: [episodes] int64, steps of each.
        """
        before = (num_steps.cumsum(0) - num_steps).repeat_interleave(self.lengths)
        index = before + self.steps
        if self.grain != "chunk":
            return torch.where(self.is_last, by_step[index], 0.0)
        total = torch.cat([by_step.new_zeros(1, dtype=torch.float64), by_step.double().cumsum(0)])
        return (total[index + 1] - total[index + 1 - self.places]).float()


def grained(scores: Tensor, grain: Grain, decisions: Tensor, places: Tensor) -> Tensor:
    """Put the scores of decisions together as a recipe asks.

    Args:
        scores: [n, chunk, numbers] float32 of decisions.
        grain: Kind of unit: a number, an action or a chunk.
        decisions: [R] int64, the decision of each unit.
        places: [R] int64, see `DecisionUnits`.

    Returns:
        [R] float32, each a sum over what its unit is made of.
    """
    if grain == "token":
        return scores.flatten(1)[decisions, places]
    by_action = scores.sum(2)
    if grain == "action":
        return by_action[decisions, places]
    return by_action.cumsum(1)[decisions, places - 1]
