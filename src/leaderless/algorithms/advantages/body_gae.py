"""Generalized advantage estimation over the decisions of a body."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.body_decisions import Decisions, RewardGrain
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen
from leaderless.base.errors import RecipeError

if TYPE_CHECKING:
    from leaderless.algorithms.algorithm import CheckedRecipe


class BodyGaeAdvantage(Advantage):
    """Generalized advantage estimation over the decisions of a body, each of several steps, with a critic.

    All that belongs to a decision has its advantage, and the critic's target A_t + V_t. With `reward: action` each step
    counts as a decision of one step, so that rewards before a step do not count for it; the critic then has a value for
    each step of a decision (its option `per_step`). A truncated episode goes on with the critic's value of what was
    seen last; one that has come to its end is worth nothing afterwards.

    Formula: A_t = d_t + discount^k decay A_{t+1}, with d_t = sum_{i<k} discount^i r_{t,i} + discount^k V_{t+1} - V_t,
    for a decision of k steps.

    Source: Schulman et al., arXiv 1506.02438, equation 16, for options of several steps as in Sutton, Precup and Singh,
    Artificial Intelligence 112 (1999), equation 8; with truncation as in Pardo et al., arXiv 1712.00378, equation 6.
    """

    type: Literal["body_gae"] = "body_gae"
    discount: float = Field(default=0.99, gt=0, le=1)
    """Gamma: how much a reward counts one step of the environment earlier."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 1 relies on rewards alone, 0 on the critic's next value."""
    reward: RewardGrain = "chunk"
    """Unit with its own reward, value and advantage: each decision, or each of its steps."""
    whiten: bool = True
    """Normalize advantages to mean 0 and deviation 1 over all that was decided in the step."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the standard deviation for whitening."""

    is_per_token: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = (
        "values",
        "final_values",
        "truncated",
        "turns",
        "env_steps",
        "turn_rewards",
        "env_rewards",
    )
    writes: ClassVar[tuple[str, ...]] = ("returns",)

    @property
    @override
    def values_steps(self) -> bool:
        return self.reward == "action"

    def check(self, recipe: CheckedRecipe) -> None:
        """Refuse advantages of steps where a whole decision has one log-probability."""
        if self.values_steps and recipe.body is not None and recipe.body.log_prob == "chunk":
            raise RecipeError.at(
                "algorithm.advantage.reward",
                "is action, but with body.log_prob=chunk all steps of a decision have one log-probability, and cannot "
                "have advantages of their own: use reward=chunk, or log_prob=action",
            )

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        values, final = (widen(inputs.column(name)) for name in ("values", "final_values"))
        after = torch.where(inputs.column("truncated"), final, torch.zeros_like(final))
        turns, steps = inputs.column("turns").long(), inputs.column("env_steps").long()
        decisions = Decisions.of(turns, steps, inputs.lengths, self.reward)
        # Rewards of the environment belong to steps, others, as a penalty or a reward of the whole episode, to units.
        by_step = inputs.columns["env_rewards"]
        assert isinstance(by_step, tuple)
        gained = decisions.gained_by_step(widen(torch.cat([torch.zeros(0), *by_step])), self.discount)
        others = widen(inputs.token_rewards()) - widen(inputs.column("turn_rewards"))
        gained = gained + decisions.gained(others, self.discount)
        gains = decisions.advantages(gained, values[decisions.last], after, discount=self.discount, decay=self.decay)[
            decisions.which
        ]
        advantages = inputs.whitened(gains, self.epsilon) if self.whiten else gains
        return AdvantageOutput(advantages, {"returns": gains + values})
