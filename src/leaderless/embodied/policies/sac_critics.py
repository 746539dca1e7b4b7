"""The critics of the soft actor-critic, which see what its policy sees."""

from __future__ import annotations

from torch import Tensor, nn

from leaderless.algorithms.sac import Ensemble
from leaderless.algorithms.settings import SacConfig
from leaderless.embodied.policies.cnn import Eyes, with_features
from leaderless.embodied.policies.protocol import Observed
from leaderless.embodied.policies.squashed import Squashed, SquashedCnn
from leaderless.embodied.simulators.protocol import Spaces


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
