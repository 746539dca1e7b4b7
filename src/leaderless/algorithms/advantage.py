"""Inputs, output and declarations of an advantage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from leaderless.algorithms.algorithm import Algorithm, CheckedRecipe, check_declared
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import Groups, count_groups, repeat_per_token
from leaderless.algorithms.returns import Moments, token_level_rewards, whiten
from leaderless.base.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.settings import AlgorithmConfig
    from leaderless.base.values import Json

    InputColumn = Tensor | tuple[Tensor, ...] | tuple[Json, ...]


@dataclass(frozen=True)
class AdvantageInputs:
    """This rank's responses, in whole groups and in any order.

    A response is what the policy sampled in one episode. If the episode has several samples, these are their response
    tokens, one sample after the other.

    Attributes:
        rewards: [n] float32, rewards minus all penalties; 0 where the reward failed.
        final_rewards: [n] float32, the same without what `penalties` subtracts at single tokens.
        penalties: [total] float32, penalty of each response token; 0 without a KL penalty in the reward.
        is_valid: [n] bool, false where the reward failed.
        is_trained: [n] bool, responses that carry a gradient: valid ones that `algorithm.overlong.filter` keeps.
        lengths: [n] int64, response tokens, summing to `total`.
        group_ids: [n] int64, prompt of each response.
        episode_ids: [n] int64, episode of each response, no two the same.
        columns: Columns that the class names in `reads`, by name: a tensor [n, ...] or, along response tokens,
            [total, ...]; for other axes a tensor for each response; for JSON-able values a tuple of n.
        sum_over_ranks: Function that sums a tensor over all ranks, which call it equally often.
        step: Number of the step, from 1.
        state: Numbers that the class keeps from step to step, and which are checkpointed. It must change them in the
            same way on all ranks.
        gather_over_ranks: Function that returns the rows of a tensor [n, ...] of all ranks, each once.
        reward_weights: Weight of each reward that may be a part of the sum, by its name in the column `reward_details`.
    """

    rewards: Tensor
    final_rewards: Tensor
    penalties: Tensor
    is_valid: Tensor
    is_trained: Tensor
    lengths: Tensor
    group_ids: Tensor
    episode_ids: Tensor
    columns: Mapping[str, InputColumn]
    sum_over_ranks: Callable[[Tensor], Tensor]
    step: int
    state: MutableMapping[str, float] = field(default_factory=dict)
    gather_over_ranks: Callable[[Tensor], Tensor] = field(default=lambda rows: rows)
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    def column(self, name: str) -> Tensor:
        """A column with one value per response or per response token.

        Raises:
            TypeError: The column is of another kind.
        """
        column = self.columns[name]
        if isinstance(column, tuple):
            raise TypeError(f"column '{name}' is no tensor: take it from `columns`")
        return column

    def token_rewards(self, final_rewards: Tensor | None = None) -> Tensor:
        """[total]: the reward at the last token, minus the penalty at each token; 0 where the reward failed.

        Args:
            final_rewards: [n], rewards to use in place of the given ones.
        """
        final = self.final_rewards if final_rewards is None else final_rewards
        return token_level_rewards(final, self.is_valid, self.penalties, self.lengths)

    def whitened(self, values: Tensor, epsilon: float) -> Tensor:
        """[total] values with mean 0 and deviation 1 over the tokens of all ranks that train; 0 at the others."""
        is_counted = repeat_per_token(self.is_trained, self.lengths)
        moments = Moments.of(self.sum_over_ranks(Moments.count(values, is_counted)))
        return whiten(values, is_counted, moments, epsilon=epsilon)

    def groups(self) -> Groups:
        """The rewards by group."""
        return Groups.of(self.rewards, self.is_valid, self.group_ids)

    def signal_share(self) -> float:
        """Groups with a signal over all groups, on all ranks."""
        counts = count_groups(self.rewards, self.is_valid, self.group_ids)
        with_signal, count = self.sum_over_ranks(counts).tolist()
        return float(with_signal / max(count, 1.0))


@dataclass(frozen=True)
class AdvantageOutput:
    """Advantages, and what else follows from them.

    Attributes:
        advantages: [n], or [total] if the class is `is_per_token`.
        columns: [total] columns that the class names in `writes`, by name.
        metrics: Values of the same shape as the advantages, by the name of the metric, which is their mean over the
            responses or tokens whose reward did not fail, on all ranks.
    """

    advantages: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Advantage(Algorithm):
    """A way to turn rewards into advantages.

    A response whose reward failed is left out of its group's statistics and has advantage 0. In advantages that compare
    the responses of a group, so has every response of a group with fewer than two rewards or with equal ones.

    Attributes:
        is_per_token: Whether advantages differ from token to token of a response.
        compares_siblings: Whether a response is compared with the others of its group.
        writes: Columns that it writes besides `advantages`, one value per response token.
        stage: Built-in stage that computes it.
        judges: Its use of rewards if it does not add them up, such as "asks whether a response is correct"; then no
            penalty can be subtracted from them. Empty if penalties can be.
    """

    is_per_token: ClassVar[bool] = False
    compares_siblings: ClassVar[bool] = False
    writes: ClassVar[tuple[str, ...]] = ()
    stage: ClassVar[str] = "advantage"
    judges: ClassVar[str] = ""

    @property
    def row_columns(self) -> Mapping[str, str]:
        """Columns that every row to train on must have, by the setting of the class that names each."""
        return {}

    @property
    def values_steps(self) -> bool:
        """Whether it needs a critic that has a value for each step of a body's decision, not one for all of them."""
        return False

    @abstractmethod
    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses."""

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings: penalties in rewards that it judges."""
        if self.judges and algorithm.kl.place == "reward":
            yield (
                f"algorithm.kl.place=reward does not go with advantage.type={self.type}, which {self.judges}: "
                "use kl.place=loss"
            )
        if self.judges and algorithm.overlong.buffer_tokens:
            yield (
                f"algorithm.overlong.buffer_tokens does not go with advantage.type={self.type}, which {self.judges}: "
                "leave it out, or use overlong.filter"
            )

    def check(self, recipe: CheckedRecipe) -> None:
        """Refuse groups of one response where responses are compared with each other."""
        if self.compares_siblings:
            self.check_siblings(recipe)

    def check_siblings(self, recipe: CheckedRecipe) -> None:
        """Refuse groups of one response."""
        if recipe.batch.responses_per_prompt < 2:
            raise RecipeError.at(
                "batch.responses_per_prompt",
                f"must be at least 2: algorithm.advantage.type={self.type} compares the responses of a group with each "
                "other, and a response alone has no advantage",
            )


def compute(advantage: Advantage, inputs: AdvantageInputs) -> AdvantageOutput:
    """Compute an advantage, and set it to 0 where the reward failed, whatever the class computes there.

    Raises:
        ValueError: The class returns something else than it declares.
    """
    output = advantage.compute(inputs)
    total = int(inputs.lengths.sum())
    is_counted = repeat_per_token(inputs.is_valid, inputs.lengths) if advantage.is_per_token else inputs.is_valid
    parts = {"advantages": (output.advantages, len(is_counted))}
    parts |= {f"the column '{name}'": (values, total) for name, values in output.columns.items()}
    parts |= {f"the metric '{name}'": (values, len(is_counted)) for name, values in output.metrics.items()}
    for name, (values, size) in parts.items():
        if values.shape != (size,):
            each = "response token" if size == total else "response"
            raise ValueError(
                f"algorithm.advantage.type={advantage.type} returned {name} of shape {list(values.shape)}: there must "
                f"be one value for each {each}, [{size}]"
            )
    check_declared(advantage, "writes", output.columns, advantage.writes)
    check_declared(advantage, "metrics", output.metrics, advantage.metrics)
    return replace(output, advantages=torch.where(is_counted, output.advantages.float(), 0.0))


def count_groups_without_signal(advantages: Tensor, group_ids: Tensor) -> tuple[int, int]:
    """Number of groups whose advantages, [n], are all 0, and number of all groups."""
    groups, group = torch.unique(group_ids, return_inverse=True)
    size = torch.zeros(len(groups), dtype=torch.float64, device=advantages.device).index_add(
        0, group, advantages.double().abs()
    )
    return int((size == 0).sum()), len(groups)
