"""Small policies for a body whose state is known: actions of real numbers from a normal distribution, or choices."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from leaderless.embodied.policies.actions import Bins
from leaderless.embodied.policies.observations import StateNormalizer
from leaderless.embodied.policies.protocol import Acted, BodyPolicy, BodyValue, DecisionScores, Observed, as_normal
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.models.uploads import constants


def perceptron(num_inputs: int, hidden_size: int, num_layers: int, num_outputs: int, gain: float) -> nn.Sequential:
    """Layers with tanh between them and orthogonal weights; `gain` is the scale of the last one.

    Raises:
        ValueError: There is nothing to see, or a size is below 1.
    """
    if min(num_inputs, hidden_size, num_layers) < 1:
        raise ValueError(
            f"state_size={num_inputs}, hidden_size={hidden_size}, num_layers={num_layers}: all must be at least 1; "
            "for images without a state, use film"
        )
    sizes = [num_inputs, *[hidden_size] * num_layers]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [_linear(before, after, math.sqrt(2)), nn.Tanh()]
    return Perceptron(*layers, _linear(hidden_size, num_outputs, gain))


class Perceptron(nn.Sequential):
    """Layers that take float32, whatever the type of their weights."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = super().forward(input.to(next(self.parameters()).dtype))  # type: ignore[no-untyped-call]
        return found


def _linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Mlp(BodyPolicy):
    """Actions from the state.

    Numbers of real actions are normal, with a deviation that does not depend on the state; the environment gets them
    cut to its range, and their log-probabilities belong to what was drawn.
    """

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 1,
        hidden_size: int = 64,
        num_layers: int = 2,
        first_deviation: float = 1.0,
        normalize: bool = False,
    ) -> None:
        """Make a policy with random weights.

        Args:
            spaces: Observations and actions of the environment.
            chunk: Steps of a decision.
            hidden_size: Width of the hidden layers.
            num_layers: Number of hidden layers.
            first_deviation: Standard deviation of actions at first.
            normalize: Whether it sees the state with mean 0 and deviation 1; see `StateNormalizer`.
        """
        super().__init__()
        self.spaces, self.chunk = spaces, chunk
        self.bins = Bins(spaces, 2) if isinstance(spaces.actions, Discrete) else None
        self.score_dim = 1 if self.bins else spaces.actions.dim if isinstance(spaces.actions, Continuous) else 1
        self.choice_size = self.noise_size = chunk * self.score_dim
        self.normalizer = StateNormalizer(spaces.state_size) if normalize else nn.Identity()
        num_outputs = self.choice_size * (self.bins.num if self.bins else 1)
        self.layers = perceptron(spaces.state_size, hidden_size, num_layers, num_outputs, 0.01)
        if self.bins is None:
            self.log_deviation = nn.Parameter(torch.full((chunk, self.score_dim), math.log(first_deviation)))

    def _normal(self, observed: Observed, temperature: float) -> tuple[Tensor, Tensor]:
        mean = self.layers(self.normalizer(observed.state)).float().view(-1, self.chunk, self.score_dim)
        return mean, (self.log_deviation.float() + math.log(temperature)).expand_as(mean)

    def _logits(self, observed: Observed) -> Tensor:
        assert self.bins is not None
        logits: Tensor = self.layers(self.normalizer(observed.state)).float()
        return logits.view(-1, self.chunk, 1, self.bins.num)

    @override
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        if self.bins is not None:
            return self.bins.act(self._logits(observed), noise, temperature)
        mean, log_deviation = self._normal(observed, temperature)
        drawn = mean
        if noise is not None:
            drawn = mean + log_deviation.exp() * as_normal(noise).view(mean.shape)
        choices = drawn.flatten(1)
        return Acted(self.actions_of(choices), choices, _log_density(drawn, mean, log_deviation))

    @override
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        if self.bins is not None:
            return self.bins.score(self._logits(observed), choices, temperature)
        mean, log_deviation = self._normal(observed, temperature)
        entropies = log_deviation + 0.5 * math.log(2 * math.pi * math.e)
        return DecisionScores(_log_density(choices.view(mean.shape), mean, log_deviation), entropies)

    @override
    def actions_of(self, choices: Tensor) -> Tensor:
        actions = self.spaces.actions
        if not isinstance(actions, Continuous):
            return choices.long()
        low, high = constants(choices, actions.low, actions.high)
        return choices.view(-1, self.chunk, self.score_dim).clamp(low, high)

    @override
    def choices_of(self, actions: Tensor) -> Tensor:
        limits = Bins(self.spaces, 2)
        nearest = limits.choices_of(actions)  # refuses what is out of range
        return nearest if self.bins is not None else actions.float().flatten(1)


def _log_density(values: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Log of the density of a normal distribution."""
    return -0.5 * ((values - mean) / log_deviation.exp()) ** 2 - log_deviation - 0.5 * math.log(2 * math.pi)


class MlpValue(BodyValue):
    """A critic of the state."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 1,
        hidden_size: int = 64,
        num_layers: int = 2,
        normalize: bool = False,
        per_step: bool = False,
    ) -> None:
        """Make a critic; see `Mlp` and `BodyValue`."""
        super().__init__()
        self.spaces, self.chunk, self.per_step = spaces, chunk, per_step
        self.normalizer = StateNormalizer(spaces.state_size) if normalize else nn.Identity()
        self.layers = perceptron(spaces.state_size, hidden_size, num_layers, self.num_values, 1.0)

    @override
    def values(self, observed: Observed) -> Tensor:
        return self.shaped(self.layers(self.normalizer(observed.state)))
