"""Protocol of policies of bodies and of their critics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leaderless.embodied.simulators.protocol import Spaces
from leaderless.models.uploads import placed

LEAST_NOISE = 1e-7
"""Noise is kept away from 0 and 1, where the normal distribution has no end."""


@dataclass(frozen=True)
class Observed:
    """Observations before n decisions of any episodes; models take them on their device.

    Attributes:
        images: [n, height, width, 3] uint8 of each camera.
        state: [n, state_size] float32.
        instructions: Ids of instructions, [n, longest] int64, padded with 0, and their lengths, [n] int64; see
            `BodyPolicy.instruction_ids`.
    """

    images: Mapping[str, Tensor]
    state: Tensor
    instructions: tuple[Tensor, Tensor]

    def __len__(self) -> int:
        """Number of decisions."""
        return len(self.state)

    def select(self, rows: Tensor) -> Observed:
        """Some of them, [m] int64."""
        ids, lengths = self.instructions
        images = {camera: image[rows] for camera, image in self.images.items()}
        return Observed(images, self.state[rows], (ids[rows], lengths[rows]))

    def placed(self, device: torch.device) -> Observed:
        """The same on a device, as `leaderless.models.uploads.placed` puts it there."""
        ids, lengths = self.instructions
        images = {camera: placed(image, device) for camera, image in self.images.items()}
        return Observed(images, placed(self.state, device), (placed(ids, device), placed(lengths, device)))


def instructions_of(observed: Observed) -> list[str]:
    """The instructions before n decisions, for models that leave `BodyModel.instruction_ids` as it is."""
    ids, lengths = (one.tolist() for one in observed.instructions)
    return [bytes(row[:length]).decode().replace("\0", "") for row, length in zip(ids, lengths, strict=True)]


@dataclass(frozen=True)
class Acted:
    """Decisions as they were drawn.

    Attributes:
        actions: [n, chunk, dim] float32, or [n, chunk] int64 choices of the environment.
        choices: [n, choice_size] float32, all that `score` needs to know of them.
        log_probs: [n, chunk, score_dim] float32.
    """

    actions: Tensor
    choices: Tensor
    log_probs: Tensor


class DecisionScores(NamedTuple):
    """Decisions under a policy; a tuple, in which sharding finds the tensors with a gradient.

    Attributes:
        log_probs: [n, chunk, score_dim] float32.
        entropies: [n, chunk, score_dim] float32.
    """

    log_probs: Tensor
    entropies: Tensor


class BodyModel(nn.Module):
    """Common part of policies and critics.

    Rows never depend on one another, and no buffer changes in training. A large model names the classes of its layers
    in `_no_split_modules`, as models of transformers do: ranks then gather its weights layer by layer.

    Attributes:
        spaces: Observations and actions of the environment.
        chunk: Steps of a decision.
        checkpoint: Folder that the constructor's argument `path` names, and that it has read; None without one.
    """

    spaces: Spaces
    chunk: int
    checkpoint: Path | None = None
    _no_split_modules: Sequence[str] = ()

    def instruction_ids(self, text: str) -> list[int]:
        """Ids of an instruction: its bytes, unless the model has a vocabulary."""
        return list(text.encode())


class BodyPolicy(BodyModel, ABC):
    """A model that decides on a chunk of actions at once.

    Attributes:
        score_dim: Log-probabilities of an action: one for each of its numbers, or 1 for all together.
        choice_size: Numbers that say what was chosen in a decision.
        noise_size: Random numbers that a decision takes.
    """

    score_dim: int
    choice_size: int
    noise_size: int

    @abstractmethod
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        """Decide.

        Args:
            observed: Observations.
            noise: [n, noise_size] float64, at least 0 and below 1; None to choose what is likeliest.
            temperature: Divisor of logits, or factor of the spread.
        """

    @abstractmethod
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        """The log-probabilities that `act` gave choices [n, choice_size], under the weights of now, with a graph."""

    def forward(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        """Score choices, by a call of the module."""
        return self.score(observed, choices, temperature)

    @abstractmethod
    def actions_of(self, choices: Tensor) -> Tensor:
        """The actions of choices; see `Acted`."""

    @abstractmethod
    def choices_of(self, actions: Tensor) -> Tensor:
        """The choices whose actions come closest to some, [n, chunk, dim] float32 or [n, chunk] int64, to imitate them.

        Raises:
            ValueError: An action is outside of what the environment takes.
        """


class BodyValue(BodyModel, ABC):
    """A model of the reward to come.

    Attributes:
        per_step: Whether it has a value for each step of a decision, of what comes from that step on.
    """

    per_step: bool = False

    @property
    def num_values(self) -> int:
        """Values of what is seen."""
        return self.chunk if self.per_step else 1

    def new_head(self, num_features: int) -> nn.Linear:
        """A layer that makes values of features; its first values are 0."""
        head = nn.Linear(num_features, self.num_values)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def shaped(self, values: Tensor) -> Tensor:
        """Values [n, num_values] in the form that `values` returns."""
        return values.float() if self.per_step else values.float()[:, 0]

    def name_in_policy(self, name: str) -> str | None:  # noqa: ARG002
        """Name of one of its weights in a policy that sees in the same way, with whose weights it can begin.

        Returns:
            None for a weight of its own.
        """
        return None

    @abstractmethod
    def values(self, observed: Observed) -> Tensor:
        """[n] float32: value of what is seen; [n, chunk] if it is `per_step`."""

    def forward(self, observed: Observed) -> Tensor:
        """Compute the values, by a call of the module."""
        return self.values(observed)


def as_normal(uniform: Tensor) -> Tensor:
    """Normal float32 noise from noise that is uniform from 0 to 1."""
    middle = uniform.double().clamp(LEAST_NOISE, 1 - LEAST_NOISE)
    return (math.sqrt(2) * torch.erfinv(2 * middle - 1)).float()
