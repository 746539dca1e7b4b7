"""The mean and the deviation of what a body's state has been, by which policies and critics see it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST_VARIANCE = 1e-8
"""Added to the variance, so that a number that never changes becomes 0."""
LIMIT = 10.0
"""Largest size of a normalized number."""


class StateNormalizer(nn.Module):
    """States with mean 0 and deviation 1, as far as they have been seen.

    Its numbers are weights without a gradient: they are sent, saved and exported like all others, and are of the same
    version. A step's updates see them as its episodes have; afterwards the engine adds what was seen in the step.
    """

    def __init__(self, state_size: int) -> None:
        """Leave states as they are, until some have been added."""
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(state_size), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(state_size), requires_grad=False)
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, state: Tensor) -> Tensor:
        """[n, state_size] float32, from -10 to 10."""
        return ((state - self.mean) / (self.variance + LEAST_VARIANCE).sqrt()).clamp(-LIMIT, LIMIT)


def moments(states: Tensor, around: Tensor) -> Tensor:
    """Sums over ranks, [1 + 2 * state_size] float64: number of states [n, state_size], sums of distances and squares.

    Distances are those from `around` [state_size], so that sums of similar states do not cancel.
    """
    distances = states.double() - around.double()
    return torch.cat([distances.new_tensor([len(states)]), distances.sum(0), distances.square().sum(0)])


def joined(mean: Tensor, variance: Tensor, count: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count, all float64, after states whose `moments` around the mean are added.

    Source: Chan, Golub and LeVeque, The American Statistician 37 (1983), equation 2.1.
    """
    size = len(mean)
    more, sums, squares = added[:1], added[1 : 1 + size], added[1 + size :]
    total = count.double() + more
    shift = sums / more
    own = squares - more * shift.square()
    spread = variance.double() * count + own + shift.square() * count * more / total
    return mean.double() + shift * more / total, spread / total, total
