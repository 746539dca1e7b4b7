"""Small policies that see, with the actions of those in `mlp`: from a normal distribution, or choices."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from leaderless.embodied.policies.mlp import Mlp, MlpValue
from leaderless.embodied.policies.observations import StateNormalizer
from leaderless.embodied.policies.protocol import Acted, BodyValue, DecisionScores, Observed
from leaderless.embodied.simulators.protocol import Spaces

LEAST_SIDE = 8
"""Fewest pixels of a side, for which three convolutions leave something."""


def with_features(spaces: Spaces, num_features: int) -> Spaces:
    """Spaces whose state also has the features of each camera's images, as `Eyes` make them.

    Raises:
        ValueError: The environment shows no images, or very small ones.
    """
    if not spaces.images:
        raise ValueError("it needs images, but the environment shows none: use mlp, or squashed for SAC")
    if small := [camera for camera, size in spaces.images.items() if min(size) < LEAST_SIDE]:
        raise ValueError(f"images of camera '{small[0]}' have {spaces.images[small[0]]} pixels: 8 by 8 are needed")
    return replace(spaces, state_size=spaces.state_size + num_features * len(spaces.images))


class Eyes(nn.Module):
    """Observations whose state also has features of the images: for each camera, three convolutions that halve it.

    Attributes:
        channels: Features of the first convolution.
        num_features: Features of the images of each camera.
    """

    def __init__(self, spaces: Spaces, channels: int, num_features: int, *, normalize: bool = False) -> None:
        """Make the layers for spaces that `with_features` takes."""
        super().__init__()
        self.channels, self.num_features = channels, num_features
        self.normalizer = StateNormalizer(spaces.state_size) if normalize else nn.Identity()
        self.cameras = nn.ModuleDict()
        for camera, (height, width) in spaces.images.items():
            size = 2 * channels * -(-height // 8) * -(-width // 8)
            self.cameras[camera] = nn.Sequential(
                nn.Conv2d(3, channels, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(size, num_features),
                nn.Tanh(),
            )

    def forward(self, observed: Observed) -> Observed:
        """See the class."""
        found = [self.normalizer(observed.state)]
        for camera, layers in self.cameras.items():
            pixels = observed.images[camera].permute(0, 3, 1, 2).to(next(layers.parameters()).dtype)
            found.append(layers(pixels / 127.5 - 1).float())
        return replace(observed, state=torch.cat(found, dim=1))


class Cnn(Mlp):
    """Actions from images and state; instructions are not read."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 1,
        channels: int = 16,
        num_features: int = 64,
        hidden_size: int = 64,
        first_deviation: float = 1.0,
        normalize: bool = False,
    ) -> None:
        """Make a policy with random weights; see `Mlp` for actions and `Eyes` for what it sees by."""
        wide = with_features(spaces, num_features)
        super().__init__(wide, chunk=chunk, hidden_size=hidden_size, num_layers=1, first_deviation=first_deviation)
        self.spaces = spaces
        self.eyes = Eyes(spaces, channels, num_features, normalize=normalize)

    @override
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        return super().act(self.eyes(observed), noise, temperature)

    @override
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        return super().score(self.eyes(observed), choices, temperature)


class CnnValue(BodyValue):
    """A critic that sees in the same way."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 1,
        channels: int = 16,
        num_features: int = 64,
        hidden_size: int = 64,
        normalize: bool = False,
        per_step: bool = False,
    ) -> None:
        """Make a critic; see `Cnn` and `BodyValue`."""
        super().__init__()
        self.spaces, self.chunk, self.per_step = spaces, chunk, per_step
        self.eyes = Eyes(spaces, channels, num_features, normalize=normalize)
        self.judge = MlpValue(
            with_features(spaces, num_features), chunk=chunk, hidden_size=hidden_size, num_layers=1, per_step=per_step
        )

    @override
    def values(self, observed: Observed) -> Tensor:
        return self.judge.values(self.eyes(observed))
