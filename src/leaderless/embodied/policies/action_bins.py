"""Actions in bins: each number of an action is one of several values, drawn from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.embodied.policies.protocol import Acted, DecisionScores
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.models.uploads import constants


class Bins:
    """How the numbers of actions are divided: evenly from the smallest to the largest, or the environment's choices.

    Attributes:
        num: Number of bins.
        dim: Numbers of an action.
    """

    def __init__(self, spaces: Spaces, num_bins: int) -> None:
        """Divide what an environment takes.

        Raises:
            ValueError: There are fewer than two bins.
        """
        actions = spaces.actions
        self._is_discrete = isinstance(actions, Discrete)
        if not self._is_discrete and num_bins < 2:
            raise ValueError(f"num_bins={num_bins}: there must be at least two")
        self.num = actions.num_choices if isinstance(actions, Discrete) else num_bins
        self.dim = actions.dim if isinstance(actions, Continuous) else 1
        self._low = torch.tensor(actions.low if isinstance(actions, Continuous) else (0.0,))
        self._high = torch.tensor(actions.high if isinstance(actions, Continuous) else (float(self.num - 1),))

    def act(self, logits: Tensor, noise: Tensor | None, temperature: float) -> Acted:
        """Draw from logits [n, chunk, dim, num] with noise [n, chunk * dim]; without noise, take the likeliest."""
        chosen, log_probs = self.draw(logits, noise, temperature)
        choices = chosen.flatten(1).float()
        return Acted(self.actions_of(choices, logits.shape[1]), choices, log_probs)

    def draw(self, logits: Tensor, noise: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        """Chosen bins [n, chunk, dim] and their log-probabilities; see `act`."""
        if noise is None:
            chosen, scaled = logits.argmax(-1), logits.log_softmax(-1)
        else:
            scaled = (logits / temperature).log_softmax(-1)
            total = scaled.double().exp().cumsum(-1)
            chosen = (total <= noise.view(*logits.shape[:3], 1) * total[..., -1:]).sum(-1).clamp(max=self.num - 1)
        return chosen, scaled.gather(-1, chosen[..., None]).squeeze(-1)

    def score(self, logits: Tensor, choices: Tensor, temperature: float) -> DecisionScores:
        """Scores of choices [n, chunk * dim] under logits [n, chunk, dim, num]."""
        scaled = (logits / temperature).log_softmax(-1)
        chosen = choices.view(logits.shape[:3]).long()
        entropies = -(scaled.exp() * scaled).sum(-1)
        return DecisionScores(scaled.gather(-1, chosen[..., None]).squeeze(-1), entropies)

    def actions_of(self, choices: Tensor, chunk: int) -> Tensor:
        """The middle of the range between two bins' borders, [n, chunk, dim], or choices [n, chunk]."""
        if self._is_discrete:
            return choices.long()
        low, high = constants(choices, self._low, self._high)
        return low + choices.view(-1, chunk, self.dim) / (self.num - 1) * (high - low)

    def choices_of(self, actions: Tensor) -> Tensor:
        """The nearest bins of actions [n, chunk, dim], or of choices [n, chunk].

        Raises:
            ValueError: An action is outside of what the environment takes.
        """
        values = actions.float().view(*actions.shape[:2], self.dim)
        low, high = self._low, self._high
        is_outside = (values < low - 1e-4) | (values > high + 1e-4) | ~values.isfinite()
        if bool(is_outside.any()):
            place = tuple(is_outside.nonzero()[0].tolist())
            raise ValueError(
                f"an action has {float(values[place])} as its number {place[-1]}, which must be from "
                f"{float(low[place[-1]])} to {float(high[place[-1]])}: these are demonstrations of another body"
            )
        return ((values - low) / (high - low) * (self.num - 1)).round().clamp(0, self.num - 1).flatten(1)
