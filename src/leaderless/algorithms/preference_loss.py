"""Inputs, output and declarations of a loss of preferences.

All values belong to rows, [n]: pairs of a chosen and a rejected response to one prompt, or single responses that are
desirable or not. The log-probability of a response is the sum over its tokens, its end included. Half-precision inputs
are converted to float32, in which losses are computed and returned.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.algorithm import Algorithm
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen

if TYPE_CHECKING:
    from torch import Tensor

Preferences = Literal["pairs", "singles"]
"""Form of the preferences in rows: one of two responses is preferred, or a response is desirable or not."""


@dataclass(frozen=True)
class PreferenceInputs:
    """The rows of a micro-batch, all on one device. Of a pair, the first response is the chosen one.

    Attributes:
        first: [n] log-probability of the first response, or of the only one, under the current policy, with gradient.
        second: [n] log-probability of the second response; 0 for single ones.
        reference_first: [n] log-probability of the first response under the reference; 0 without a reference.
        reference_second: [n] log-probability of the second response under the reference.
        first_lengths: [n] int64 tokens of the first response, at least 1.
        second_lengths: [n] int64 tokens of the second response, at least 1.
        is_desirable: [n] bool, single responses that are desirable; true for pairs.
        divergence: [] estimated divergence of the policy from the reference, for losses of single responses.
    """

    first: Tensor
    second: Tensor
    reference_first: Tensor
    reference_second: Tensor
    first_lengths: Tensor
    second_lengths: Tensor
    is_desirable: Tensor
    divergence: Tensor

    @property
    def first_ratio(self) -> Tensor:
        """[n] logarithm of the ratio of policy to reference, of the first response."""
        return widen(self.first) - widen(self.reference_first)

    @property
    def second_ratio(self) -> Tensor:
        """[n] logarithm of the ratio of policy to reference, of the second response."""
        return widen(self.second) - widen(self.reference_second)


@dataclass(frozen=True)
class PreferenceOutput:
    """The loss of each row, and the rewards that the policy implies.

    Attributes:
        loss: [n], at least float32.
        first_rewards: [n] implied rewards of the first responses, of which only the values count.
        second_rewards: [n] implied rewards of the second responses; 0 for single ones.
    """

    loss: Tensor
    first_rewards: Tensor
    second_rewards: Tensor


class PreferenceLoss(Algorithm):
    """A loss of preferences. The loss of a mini-batch is the mean over its rows, on all ranks.

    Attributes:
        data: Kind of rows: pairs, or single responses.
        uses_reference: Whether the log-probabilities of the reference are read.
    """

    data: ClassVar[Preferences] = "pairs"
    uses_reference: ClassVar[bool] = True
    beta: float = Field(default=0.1, gt=0)
    """Strength with which the policy is held to the reference, or scale of log-probabilities without one."""
    sft_coefficient: float = Field(default=0.0, ge=0)
    """Weight of imitation besides: the mean negative log-likelihood of the tokens of all chosen, or desirable,
    responses."""

    @abstractmethod
    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        """Compute the loss of each row of a micro-batch, without imitation."""


class RatioLoss(PreferenceLoss):
    """A loss of pairs whose rewards are beta times the logarithms of the ratios of policy to reference."""

    length_normalized: bool = False
    """Divide the log-probability of a response by the number of its tokens."""

    def rewards(self, inputs: PreferenceInputs) -> tuple[Tensor, Tensor]:
        """[n] implied rewards of the first and second responses."""
        first, second = inputs.first_ratio, inputs.second_ratio
        if self.length_normalized:
            first, second = first / inputs.first_lengths, second / inputs.second_lengths
        return self.beta * first, self.beta * second


def compute_preferences(loss: PreferenceLoss, inputs: PreferenceInputs) -> PreferenceOutput:
    """Compute a loss.

    Raises:
        ValueError: The class returns something else than it declares.
    """
    output = loss.compute(inputs)
    for name, values in (("loss", output.loss), ("rewards", output.first_rewards), ("rewards", output.second_rewards)):
        if values.shape != inputs.first.shape:
            raise ValueError(
                f"algorithm.preference_loss.type={loss.type} returned {name} of shape {list(values.shape)}: there must "
                f"be one value for each row, [{len(inputs.first)}]"
            )
    return output


def logistic(margin: Tensor, label_smoothing: float) -> Tensor:
    """[n] negative log-likelihood that the first of two wins, if it does in all but a share of cases."""
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(1 - label_smoothing) * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin)
