"""Actions of policies: conversion of a network's numbers, mostly from -1 to 1, to a robot's, and numbers in bins."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import nearest
from leaderless.embodied.policies.protocol import Acted, BodyPolicy, DecisionScores, Observed
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.models.uploads import constants

GRIPPERS = ("unchanged", "inverted")
"""Kinds of conversion of a gripper's number; see `ActionLimits.of_dataset`."""


@dataclass(frozen=True)
class ActionLimits:
    """Actions that -1 and 1 stand for.

    Attributes:
        low: Number of the robot that -1 stands for.
        high: Number of the robot that 1 stands for.
        least: Smallest number that the environment takes.
        most: Largest number that the environment takes.
        inverted: Numbers that are a gripper from 0, closed, to 1, open, which the environment closes above 0.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]
    inverted: tuple[int, ...] = ()

    @classmethod
    def of_environment(cls, spaces: Spaces) -> Self:
        """The limits of what an environment takes.

        Raises:
            ValueError: It takes choices.
        """
        actions = spaces.actions
        if not isinstance(actions, Continuous):
            raise ValueError("the environment takes choices, but this policy moves by real numbers: use mlp or cnn")
        return cls(actions.low, actions.high, actions.low, actions.high)

    @classmethod
    def of_dataset(cls, statistics: Json, name: str, spaces: Spaces, gripper: str = "unchanged") -> Self:
        """The limits in the statistics of a dataset, as OpenVLA's configuration has them in `norm_stats`.

        Where the mask is false, as for grippers, numbers stay as they are, or are inverted: OpenVLA's data has 0 for
        a closed gripper and 1 for an open one, while robosuite, and so LIBERO, closes it at 1 and opens it at -1. Its
        evaluation sends `-sign(2 a - 1)`.

        Source:
            openvla/openvla, experiments/robot/libero/run_libero_eval.py (`normalize_gripper_action`,
            `invert_gripper_action`). Deviation: 0.5, at which the sign is 0, opens.

        Args:
            statistics: Statistics of all datasets.
            name: Name of the dataset of this robot.
            spaces: Actions of the environment.
            gripper: Treatment of numbers whose mask is false, `unchanged` or `inverted`.

        Raises:
            ValueError: There is no such dataset, it belongs to another robot, or its gripper cannot be inverted.
        """
        if gripper not in GRIPPERS:
            raise ValueError(f"gripper='{gripper}': must be {' or '.join(GRIPPERS)}")
        around = cls.of_environment(spaces)
        if not isinstance(statistics, Mapping) or name not in statistics:
            known = list(statistics) if isinstance(statistics, Mapping) else []
            raise ValueError(
                f"statistics='{name}': the checkpoint has none of that name{nearest(name, known)}; it has those of "
                f"{', '.join(sorted(known)) or 'no robot'}"
            )
        found = cast("Mapping[str, Mapping[str, Sequence[float]]]", statistics[name])["action"]
        low, high = list(found["q01"]), list(found["q99"])
        if len(low) != len(around.least):
            raise ValueError(
                f"statistics='{name}' are those of another robot: its actions have {len(low)} numbers, those of the "
                f"environment {len(around.least)}"
            )
        mask = found.get("mask", [True] * len(low))
        return cls(
            tuple(float(one) if is_scaled else -1.0 for one, is_scaled in zip(low, mask, strict=True)),
            tuple(float(one) if is_scaled else 1.0 for one, is_scaled in zip(high, mask, strict=True)),
            around.least,
            around.most,
            _inverted(mask, name, around) if gripper == "inverted" else (),
        )

    def restore(self, values: Tensor) -> Tensor:
        """Actions [n, chunk, dim] of the robot, within what the environment takes."""
        low, high, least, most = constants(values, self.low, self.high, self.least, self.most)
        actions = (low + (values + 1) / 2 * (high - low)).clamp(least, most)
        for number in self.inverted:
            actions[..., number] = torch.where(values[..., number] < 0.5, 1.0, -1.0)
        return actions

    def normalize(self, actions: Tensor) -> Tensor:
        """The network's numbers of actions [n, chunk, dim] of the robot.

        Raises:
            ValueError: An action is outside of what the environment takes.
        """
        low, high, least, most = constants(actions, self.low, self.high, self.least, self.most)
        refuse_outside(actions, least, most)
        values = (actions.float() - low) / (high - low).clamp(min=1e-8) * 2 - 1
        for number in self.inverted:
            values[..., number] = (1 - actions[..., number].float()) / 2
        return values


def refuse_outside(actions: Tensor, least: Tensor, most: Tensor) -> None:
    """Raise a ValueError if an action [n, chunk, dim] is outside of what the environment takes, [dim] each."""
    is_outside = (actions < least - 1e-4) | (actions > most + 1e-4) | ~actions.isfinite()
    if bool(is_outside.any()):
        place = tuple(is_outside.nonzero()[0].tolist())
        raise ValueError(
            f"an action has {float(actions[place])} as its number {place[-1]}, which must be from "
            f"{float(least[place[-1]])} to {float(most[place[-1]])}: these are demonstrations of another body"
        )


def _inverted(mask: Sequence[float], name: str, around: ActionLimits) -> tuple[int, ...]:
    """The numbers of a gripper, which the environment has to take from -1 to 1."""
    found = tuple(number for number, is_scaled in enumerate(mask) if not is_scaled)
    if not found:
        raise ValueError(
            f"gripper='inverted': all numbers of statistics='{name}' are scaled, so none is known to be a gripper; "
            "leave it 'unchanged'"
        )
    for number in found:
        if (around.least[number], around.most[number]) != (-1.0, 1.0):
            raise ValueError(
                f"gripper='inverted': the environment takes its number {number} from {around.least[number]:g} to "
                f"{around.most[number]:g}, but must take a gripper from -1, open, to 1, closed; leave it 'unchanged'"
            )
    return found


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
        refuse_outside(values, low, high)
        return ((values - low) / (high - low) * (self.num - 1)).round().clamp(0, self.num - 1).flatten(1)


class BinPolicy(BodyPolicy):
    """A policy that chooses all numbers of a decision from bins at once.

    Attributes:
        bins: Bins of the numbers of an action.
    """

    bins: Bins

    def begin(self, spaces: Spaces, chunk: int, bins: Bins) -> None:
        """Set sizes."""
        self.spaces, self.chunk, self.bins, self.score_dim = spaces, chunk, bins, bins.dim
        self.choice_size = self.noise_size = chunk * bins.dim

    @abstractmethod
    def logits(self, observed: Observed) -> Tensor:
        """Logits of bins, [n, chunk, dim, num] float32."""

    @override
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        return self.bins.act(self.logits(observed), noise, temperature)

    @override
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        return self.bins.score(self.logits(observed), choices, temperature)

    @override
    def actions_of(self, choices: Tensor) -> Tensor:
        return self.bins.actions_of(choices, self.chunk)

    @override
    def choices_of(self, actions: Tensor) -> Tensor:
        return self.bins.choices_of(actions)
