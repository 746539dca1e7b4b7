"""Inputs, output and declarations of a policy loss.

A ratio is the probability of a token under the current policy over the one under the old policy. Log-ratios are cut at
+-20 before they are exponentiated, so that nothing overflows: e^20 is far outside any clipping range. Half-precision
inputs are converted to float32, in which losses are computed and returned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from leaderless.algorithms.algorithm import Algorithm, check_declared
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import log_ratio_of, widen

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.settings import AlgorithmConfig


@dataclass(frozen=True)
class LossInputs:
    """The response tokens of a micro-batch, one sample's after another's, all on one device.

    Attributes:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        lengths: [n] int64, response tokens of each sample, summing to `total`.
        is_counted: [total] bool, tokens that count in the mean; all values of the others are 0.
        is_chosen: [total] bool, tokens that the class has chosen; none if it chooses none.
        columns: Columns that the class names in `reads`, by name, [total, ...]; the value of a sample stands at each of
            its tokens.
        step: Number of the step, from 1.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    lengths: Tensor
    is_counted: Tensor
    is_chosen: Tensor
    columns: Mapping[str, Tensor]
    step: int

    @property
    def log_ratio(self) -> Tensor:
        """[total] logarithms of ratios, at least in float32."""
        return log_ratio_of(self.log_probs, self.old_log_probs)


@dataclass(frozen=True)
class ChoiceInputs:
    """The tokens of this rank's mini-batch that count.

    Attributes:
        log_probs: [total] under the current policy, without gradient.
        advantages: [total].
        noise: [total], uniform between 0 and 1, and determined by sample and position.
        sum_over_ranks: Function that sums a tensor over all ranks, which call it equally often.
        columns: Columns that the class names in `reads`, by name, [total, ...], as in `LossInputs`.
    """

    log_probs: Tensor
    advantages: Tensor
    noise: Tensor
    sum_over_ranks: Callable[[Tensor], Tensor]
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """The loss of each token, and what is reported about it.

    Attributes:
        loss: [total], at least float32.
        is_clipped: [total] bool, tokens whose gradient is removed or cut.
        metrics: [total] each, without gradient, by the name of the metric, which is their mean over the tokens that
            count, on all ranks and in all updates of a step.
    """

    loss: Tensor
    is_clipped: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def without_clipping(cls, loss: Tensor, metrics: Mapping[str, Tensor] | None = None) -> LossOutput:
        """A loss, [total], that cuts the gradient of no token."""
        return cls(loss, torch.zeros_like(loss, dtype=torch.bool), metrics or {})


class PolicyLoss(Algorithm):
    """A loss of the policy. Its metrics are reported under the name of the role, as in `policy/clip_fraction`.

    Attributes:
        chooses_tokens: Whether it treats some tokens of a mini-batch differently, which `choose` finds.
    """

    chooses_tokens: ClassVar[bool] = False

    @abstractmethod
    def compute(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of each token of a micro-batch.

        It is averaged as `algorithm.aggregation` says. The correction, the KL penalty and the entropy bonus are added
        afterwards.
        """

    def choose(self, inputs: ChoiceInputs) -> Tensor:
        """Choose the tokens that the loss treats differently, [total] bool, before each update."""
        return torch.zeros_like(inputs.log_probs, dtype=torch.bool)


class ResponseLoss(PolicyLoss):
    """A loss that judges the tokens of a sample together, by the mean of their log-ratios, as GSPO and GMPO.

    Each sample of an episode is judged by itself, since its tokens were drawn in a context of their own and the other
    samples may be on other ranks. Its weight is its share of the episode's tokens, so that every episode has the same
    weight. How an episode is divided into samples changes such a loss where the policy has moved, and a loss of single
    tokens nowhere. A micro-batch holds whole samples, so that no loss depends on micro-batches.
    """

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings of the algorithm: a mean other than over responses."""
        if algorithm.aggregation != "sequence_mean_token_mean":
            yield (
                f"algorithm.aggregation={algorithm.aggregation} does not go with policy_loss.type={self.type}, which "
                "is defined as a mean over responses: use sequence_mean_token_mean"
            )


class BehaviorLoss(PolicyLoss):
    """A loss with ratios to the engine that sampled, which cover both old weights and other arithmetic.

    There are two policies and no third one between them, so old rows need no other correction.
    """

    reads: ClassVar[tuple[str, ...]] = ("rollout_log_probs",)

    @staticmethod
    def log_ratio_to_engine(inputs: LossInputs | ChoiceInputs) -> Tensor:
        """[total] logarithms of the ratios of current probabilities to the engine's, at least in float32."""
        return log_ratio_of(inputs.log_probs, inputs.columns["rollout_log_probs"])

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings of the algorithm: a policy that it does not look at."""
        if algorithm.correction.has_weights:
            yield (
                f"algorithm.correction.type={algorithm.correction.type} does not go with policy_loss.type={self.type}, "
                "whose ratio is to the engine that sampled already: set it to none"
            )
        if algorithm.proximal == "interpolated":
            yield (
                f"algorithm.proximal=interpolated does not go with policy_loss.type={self.type}, which has no policy "
                "between the one that sampled and the current one: leave it out"
            )


def covariances(log_probs: Tensor, advantages: Tensor, *, mean_log_prob: float, mean_advantage: float) -> Tensor:
    """The contribution, without gradient, of each token to the covariance of log-probability and advantage.

    Tokens of a large one lower the entropy most. The means are over the mini-batch on all ranks, so that neither
    micro-batches nor ranks matter.

    Formula: (log p - mean log p) (A - mean A).

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, the
    definition of token-wise covariance before Clip-Cov.
    """
    return (widen(log_probs.detach()) - mean_log_prob) * (widen(advantages) - mean_advantage)


def covariances_of(inputs: ChoiceInputs) -> tuple[float, Tensor]:
    """Number of tokens of the mini-batch on all ranks, and the covariance of each of this rank's, [total]."""
    log_probs, advantages = inputs.log_probs, inputs.advantages
    sums = torch.tensor([float(len(log_probs)), float(log_probs.double().sum()), float(advantages.double().sum())])
    count, total, gain = inputs.sum_over_ranks(sums.double()).tolist()
    means = {"mean_log_prob": total / max(count, 1.0), "mean_advantage": gain / max(count, 1.0)}
    return count, covariances(log_probs, advantages, **means)


def compute(loss: PolicyLoss, inputs: LossInputs) -> LossOutput:
    """Compute a loss.

    Raises:
        ValueError: The class returns something else than it declares.
    """
    output = loss.compute(inputs)
    parts = {"a loss": output.loss, "is_clipped": output.is_clipped}
    parts |= {f"the metric '{name}'": values for name, values in output.metrics.items()}
    for name, values in parts.items():
        if values.shape != inputs.log_probs.shape:
            raise ValueError(
                f"algorithm.policy_loss.type={loss.type} returned {name} of shape {list(values.shape)}: there must be "
                f"one value for each response token, [{len(inputs.log_probs)}]"
            )
    check_declared(loss, "metrics", output.metrics, loss.metrics)
    return output
