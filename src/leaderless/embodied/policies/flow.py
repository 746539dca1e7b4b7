"""A small flow policy for states and images, and its critic."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from leaderless.embodied.policies.actions import ActionLimits
from leaderless.embodied.policies.film import Seer
from leaderless.embodied.policies.flow_policy import DeviationNet, FlowOptions, FlowPolicy
from leaderless.embodied.policies.mlp import Perceptron
from leaderless.embodied.policies.observations import StateNormalizer
from leaderless.embodied.policies.protocol import BodyValue, Observed
from leaderless.embodied.simulators.protocol import Spaces

NUM_WAVES = 8
"""Frequencies of the waves that encode the time."""


class _Looks(nn.Module):
    """Features [n, hidden_size] of images, instruction and state, or of the state alone."""

    def __init__(self, spaces: Spaces, hidden_size: int, *, normalize: bool) -> None:
        super().__init__()
        if not spaces.images and not spaces.state_size:
            raise ValueError("the environment shows neither images nor a state: there is nothing to act on")
        is_blind = normalize and not spaces.images
        self.normalizer = StateNormalizer(spaces.state_size) if is_blind else nn.Identity()
        self.seer = Seer(spaces, 32, hidden_size, normalize=normalize) if spaces.images else None
        self.state = None if spaces.images else nn.Linear(spaces.state_size, hidden_size)

    def forward(self, observed: Observed) -> Tensor:
        """See the class."""
        seen: Tensor
        if self.seer is not None:
            seen = self.seer(observed)
        else:
            assert self.state is not None
            seen = torch.tanh(self.state(self.normalizer(observed.state).to(self.state.weight.dtype)))
        return seen.float()


class SmallFlow(FlowPolicy):
    """Actions from noise, by a perceptron that sees features, the point and the time."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 4,
        hidden_size: int = 128,
        method: str = "sde",
        num_steps: int = 4,
        noise_level: float = 0.5,
        normalize: bool = False,
    ) -> None:
        """Make a policy with random weights; see `FlowOptions`, and `StateNormalizer` for `normalize`."""
        super().__init__()
        limits = ActionLimits.of_environment(spaces)
        flow = FlowOptions(method, num_steps, noise_level)
        self.begin(spaces, limits=limits, sizes=(chunk, chunk, len(limits.low)), flow=flow)
        size = chunk * self.numbers
        self.looks = _Looks(spaces, hidden_size, normalize=normalize)
        self.layers = Perceptron(
            nn.Linear(hidden_size + size + 2 * NUM_WAVES, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, size),
        )
        self.deviations = DeviationNet(hidden_size, size) if method == "noise" else None

    @override
    def look(self, observed: Observed) -> Tensor:
        features: Tensor = self.looks(observed)
        return features

    @override
    def velocity(self, looked: object, rows: Tensor, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(looked, Tensor)
        features = looked[rows]
        waves = times[:, None] * (math.pi * torch.arange(1, NUM_WAVES + 1, device=times.device))
        found = self.layers(torch.cat([features, x.flatten(1), waves.sin(), waves.cos()], dim=1)).float().view(x.shape)
        if self.deviations is None:
            return found, found
        return found, self.deviations(features, times).float().view(x.shape)


class FlowValue(BodyValue):
    """A critic that sees in the same way; its first values are 0."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 4,
        hidden_size: int = 128,
        normalize: bool = False,
        per_step: bool = False,
    ) -> None:
        """Make a critic; see `SmallFlow` and `BodyValue`."""
        super().__init__()
        self.spaces, self.chunk, self.per_step = spaces, chunk, per_step
        self.looks = _Looks(spaces, hidden_size, normalize=normalize)
        self.head = self.new_head(hidden_size)

    @override
    def values(self, observed: Observed) -> Tensor:
        return self.shaped(self.head(self.looks(observed).to(self.head.weight.dtype)))
