"""Policies of the soft actor-critic: normal numbers, squashed into the range of actions."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from leaderless.algorithms.sac import Ensemble, squashed_log_densities
from leaderless.algorithms.settings import SacConfig
from leaderless.embodied.policies.actions import Bins
from leaderless.embodied.policies.cnn import Eyes, with_features
from leaderless.embodied.policies.protocol import Acted, BodyPolicy, DecisionScores, Observed, as_normal
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.models.uploads import constants

LEAST_LOG_DEVIATION, LARGEST_LOG_DEVIATION = -5.0, 2.0
"""Limits of the deviations, before actions are squashed."""
LARGEST_SHARE = 1 - 1e-6
"""Actions that are imitated are kept away from the ends of their range, which a squashed number never reaches."""
NUM_POINTS = 24
"""Points at which the entropy is integrated."""


class Squashed(BodyPolicy):
    """Actions from the state: tanh of normal numbers, whose means and deviations depend on the state.

    What it chooses are the numbers before tanh, so that their density is known without inverting it. Densities are
    the log-probabilities of actions from -1 to 1.

    Source: Haarnoja et al., arXiv 1801.01290, appendix C.
    """

    def __init__(self, spaces: Spaces, *, chunk: int = 1, hidden_size: int = 64, num_layers: int = 2) -> None:
        """Make a policy with random weights.

        Args:
            spaces: Observations and actions of the environment.
            chunk: Steps of a decision.
            hidden_size: Width of the hidden layers.
            num_layers: Number of hidden layers.
        """
        super().__init__()
        if not isinstance(spaces.actions, Continuous):
            raise ValueError("it needs actions of real numbers: use mlp or cnn, and a workflow such as ppo")
        if min(chunk, hidden_size, num_layers, spaces.state_size) < 1:
            raise ValueError(
                f"chunk={chunk}, hidden_size={hidden_size}, num_layers={num_layers}, state_size={spaces.state_size}: "
                "all must be at least 1; for images without a state, use squashed_cnn"
            )
        self.spaces, self.chunk = spaces, chunk
        self.score_dim = spaces.actions.dim
        self.choice_size = self.noise_size = chunk * self.score_dim
        self._low, self._high = (torch.tensor(one) for one in (spaces.actions.low, spaces.actions.high))
        sizes = [spaces.state_size, *[hidden_size] * num_layers]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], 2 * self.choice_size))

    def _normal(self, observed: Observed, temperature: float) -> tuple[Tensor, Tensor]:
        """Means and log-deviations of what is squashed, [n, choice_size]."""
        mean, spread = self.layers(observed.state).chunk(2, dim=1)
        half = (LARGEST_LOG_DEVIATION - LEAST_LOG_DEVIATION) / 2
        return mean, LEAST_LOG_DEVIATION + half * (torch.tanh(spread) + 1) + math.log(temperature)

    def draw(self, observed: Observed, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions [n, choice_size] from -1 to 1 with a graph to the weights, and their log-probabilities [n].

        Args:
            observed: Observations.
            noise: [n, choice_size] float32 from a normal distribution; None for the middle of the distribution.
        """
        mean, log_deviation = self._normal(observed, 1.0)
        drawn = mean if noise is None else mean + log_deviation.exp() * noise
        return torch.tanh(drawn), squashed_log_densities(drawn, mean, log_deviation).sum(1)

    @override
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        mean, log_deviation = self._normal(observed, temperature)
        drawn = mean
        if noise is not None:
            drawn = mean + log_deviation.exp() * as_normal(noise)
        log_probs = squashed_log_densities(drawn, mean, log_deviation)
        return Acted(self.actions_of(drawn), drawn, log_probs.view(-1, self.chunk, self.score_dim))

    @override
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        """Score choices; entropies are integrals at a few points, with a graph."""
        mean, log_deviation = self._normal(observed, temperature)
        shape = (-1, self.chunk, self.score_dim)
        log_probs = squashed_log_densities(choices, mean, log_deviation)
        known = np.polynomial.hermite_e.hermegauss(NUM_POINTS)
        points, weights = (one.to(mean.dtype) for one in constants(mean, *known))
        there = mean[..., None] + log_deviation.exp()[..., None] * points
        log_densities = squashed_log_densities(there, mean[..., None], log_deviation[..., None])
        entropies = -(log_densities * weights).sum(-1) / weights.sum()
        return DecisionScores(log_probs.view(shape), entropies.view(shape))

    @override
    def actions_of(self, choices: Tensor) -> Tensor:
        low, high = (one.to(choices.dtype) for one in constants(choices, self._low, self._high))
        shares = (torch.tanh(choices).view(-1, self.chunk, self.score_dim) + 1) / 2
        return (low + shares * (high - low)).clamp(low, high)

    @override
    def choices_of(self, actions: Tensor) -> Tensor:
        Bins(self.spaces, 2).choices_of(actions)  # refuses what is out of range
        return torch.atanh(self.squash(actions).clamp(-LARGEST_SHARE, LARGEST_SHARE))

    def squash(self, actions: Tensor) -> Tensor:
        """Actions [n, chunk, dim] of the environment as numbers from -1 to 1, [n, choice_size]."""
        low, high = (one.to(actions.dtype) for one in constants(actions, self._low, self._high))
        return ((actions - low) / (high - low) * 2 - 1).flatten(1).clamp(-1, 1)


class SquashedCnn(Squashed):
    """Actions from images and state; instructions are not read."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 1,
        channels: int = 16,
        num_features: int = 64,
        hidden_size: int = 64,
        num_layers: int = 2,
    ) -> None:
        """Make a policy with random weights; see `Squashed` and `Cnn`."""
        super().__init__(
            with_features(spaces, num_features), chunk=chunk, hidden_size=hidden_size, num_layers=num_layers
        )
        self.spaces = spaces
        self.eyes = Eyes(spaces, channels, num_features)

    def _normal(self, observed: Observed, temperature: float) -> tuple[Tensor, Tensor]:
        return super()._normal(self.eyes(observed), temperature)


class Critics(nn.Module):
    """An ensemble that sees what a policy sees, with eyes of its own."""

    def __init__(self, policy: Squashed, config: SacConfig) -> None:
        """Make critics with random weights, and with the eyes of the policy's size if it has some."""
        super().__init__()
        seen = policy.spaces
        self.eyes: Eyes | None = None
        if isinstance(policy, SquashedCnn):
            self.eyes = Eyes(seen, policy.eyes.channels, policy.eyes.num_features)
            seen = with_features(seen, policy.eyes.num_features)
        num_inputs = seen.state_size + policy.choice_size
        self.heads = Ensemble(num_inputs, config.hidden_size, config.num_layers, config.num_heads)

    def forward(self, observed: Observed, actions: Tensor) -> Tensor:
        """[heads, n]: values of actions [n, numbers] from -1 to 1."""
        values: Tensor = self.heads((self.eyes(observed) if self.eyes else observed).state, actions)
        return values


def check_policy(policy: object, spaces: Spaces) -> Squashed:
    """The policy, if SAC can train it.

    Raises:
        ValueError: It is of another kind.
    """
    if not isinstance(policy, Squashed):
        best = "squashed_cnn" if spaces.images else "squashed"
        raise ValueError(f"SAC trains policies of the type squashed or squashed_cnn: use body: {best}")
    return policy
