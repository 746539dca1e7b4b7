"""Observations of bodies: columns of a batch in the form that policies take, and states with mean 0 and deviation 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from leaderless.embodied.simulators.protocol import Spaces

TYPICAL_INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"
"""Instruction by which sizes are measured: one of LIBERO's longer ones."""


def frame_bytes(spaces: Spaces) -> int:
    """Bytes of the pixels of all cameras."""
    return sum(height * width * 3 for height, width in spaces.images.values())


def images_of(pixels: Tensor, spaces: Spaces) -> dict[str, Tensor]:
    """The images of each camera, [n, height, width, 3] uint8, from all pixels, [n, bytes] uint8."""
    sizes = [height * width * 3 for height, width in spaces.images.values()]
    parts = torch.split(pixels, sizes, dim=1) if sizes else ()
    return {
        camera: part.reshape(len(pixels), height, width, 3)
        for (camera, (height, width)), part in zip(spaces.images.items(), parts, strict=True)
    }


def padded(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Instructions as ids [n, longest] int64, padded with 0, and their lengths [n] int64."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    table = torch.zeros(len(ids), max([1, *map(len, ids)]), dtype=torch.int64)
    if values := [value for row in ids for value in row]:  # at once: a tensor for each row takes longer than a network
        table[torch.arange(table.shape[1]) < lengths[:, None]] = torch.tensor(values, dtype=torch.int64)
    return table.to(device), lengths.to(device)


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
