"""The algorithm: advantage, loss, penalties, correction, and how tokens are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from leaderless.algorithms.advantage import Advantage
from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.advantages.grpo import GrpoAdvantage
from leaderless.algorithms.registry import union_of
from leaderless.config.base import Section
from leaderless.config.functions import is_function_name

if TYPE_CHECKING:
    AnyAdvantage = Advantage
else:
    AnyAdvantage = union_of(ADVANTAGES, Advantage, default="grpo")


def _type_or(default: str) -> Callable[[object], object]:
    """A function that returns the `type` in a section's settings, or the default."""
    return lambda value: value.get("type", default) if isinstance(value, Mapping) else getattr(value, "type", None)


class FunctionSection(Section):
    """A custom function."""

    function: str
    """The function, as `package.module:function`."""

    @field_validator("function")
    @classmethod
    def _is_function_name(cls, value: str) -> str:
        if not is_function_name(value):
            raise ValueError("must look like package.module:function")
        return value


class PpoLoss(Section):
    """The clipped ratio objective."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the ratio is at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio for tokens with negative advantage; unlimited by default."""


class ReinforceLoss(Section):
    """The plain policy gradient, without ratio or clipping."""

    type: Literal["reinforce"] = "reinforce"


class GspoLoss(Section):
    """The clipped objective with the ratio of whole responses."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Lower clip range: the ratio is at least 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""


class GmpoLoss(Section):
    """The geometric mean of the tokens' clipped ratios."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, gt=0)
    """Lower clip range: the log-ratio is at least -clip_low."""
    clip_high: float = Field(default=0.4, gt=0)
    """Upper clip range: the log-ratio is at most clip_high."""


class CispoLoss(Section):
    """The policy gradient weighted by a clipped ratio."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Lower clip range: the ratio is at least 1 - clip_low; 1 for no bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""


class CpgdLoss(Section):
    """A clipped log-ratio, and a penalty for drifting away from the old policy."""

    type: Literal["cpgd"] = "cpgd"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the log-ratio is at least log(1 - clip_low)."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: the log-ratio is at most log(1 + clip_high)."""
    drift_coefficient: float = Field(default=0.1, ge=0)
    """Weight of the penalty for policy drift."""
    drift_clip: float = Field(default=1.0, gt=0)
    """Largest factor in the penalty's gradient."""


class SapoLoss(Section):
    """A soft gate instead of clipping."""

    type: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0)
    """How fast the gate closes for tokens of positive advantage."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """How fast the gate closes for all others."""


class ClipCovLoss(Section):
    """The clipped ratio objective, without the gradient of some tokens of high covariance."""

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the ratio is at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""
    fraction: float = Field(default=2e-4, gt=0, lt=1)
    """Share of all tokens that lose their gradient."""
    lowest: float = Field(default=1.0, gt=0)
    """Least covariance of such a token."""
    highest: float = Field(default=5.0, gt=0)
    """Largest covariance of such a token."""


class KlCovLoss(Section):
    """The ratio objective with a penalty at the tokens of highest covariance."""

    type: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(default=2e-3, gt=0, lt=1)
    """Share of all tokens that are penalized; at least one token is."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty."""


class FunctionLoss(FunctionSection):
    """A custom function of (log_probs, old_log_probs, advantages, lengths) that returns [total] losses."""

    type: Literal["function"] = "function"


PolicyLossConfig = Annotated[
    Annotated[PpoLoss, Tag("ppo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[CpgdLoss, Tag("cpgd")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[ClipCovLoss, Tag("clip_cov")]
    | Annotated[KlCovLoss, Tag("kl_cov")]
    | Annotated[FunctionLoss, Tag("function")],
    Discriminator(_type_or("ppo")),
]


class KlConfig(Section):
    """The KL penalty towards the reference."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty, with a target the initial one; 0 removes the reference from the plan."""
    estimator: Literal["k1", "k2", "k3", "absolute"] = "k3"
    """Estimator of the divergence at each token."""
    unbiased_gradient: bool = False
    """Give the estimate the gradient of the divergence itself; only for `place: loss`."""
    place: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the rewards."""
    target: float | None = Field(default=None, gt=0)
    """Mean divergence that the weight is adapted to reach, in steps that train the policy; by default the weight is
    constant."""
    horizon: float = Field(default=10000.0, gt=0)
    """Number of episodes over which an adapted weight can change by about a fifth."""


class CorrectionConfig(Section):
    """Weights for tokens whose probability under the trainer differs from the engine's at sampling time.

    They multiply the policy loss only, not the KL penalty or the entropy bonus. Dropped tokens have weight 0 and still
    count in the denominator of the mean.
    """

    type: Literal["none", "truncate", "mask", "reject"] = "none"
    """`truncate` limits the ratio of the two probabilities to `highest`, `mask` drops ratios outside the range, and
    `reject` does the same but gives the others weight 1."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One ratio per token, or per response: the product or the geometric mean of its tokens' ratios."""
    lowest: float = Field(default=0.5, ge=0)
    """Smallest ratio that `mask` and `reject` keep."""
    highest: float = Field(default=2.0, gt=0)
    """Largest ratio that `mask` and `reject` keep, and limit of `truncate`."""


class OverlongConfig(Section):
    """Treatment of responses that are too long."""

    buffer_tokens: int = Field(default=0, ge=0)
    """Number of tokens before `rollout.max_response_tokens` over which the reward falls by up to 1; 0 for none."""
    filter: bool = False
    """Give truncated responses no gradient, in the policy and in a critic."""


class RepeatConfig(Section):
    """How repeated nodes fill a step: with rounds of new prompts, until enough groups have a signal."""

    max_rounds: int = Field(default=8, ge=1)
    """Largest number of rounds in a step, of `batch.prompts_per_step` prompts each."""
    on_exhausted: Literal["train", "stop"] = "train"
    """If there are too few groups after the last round, train on them, or stop with an error. Without any group, the
    run stops in either case."""


class CriticConfig(Section):
    """Training of the critic."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Largest change of a value in one step's updates; null for no limit."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps in which only the critic is trained."""


class AlgorithmConfig(Section):
    """Advantage, loss, penalties, correction, and how tokens are averaged."""

    advantage: AnyAdvantage = GrpoAdvantage()
    """Advantage computed from rewards."""
    policy_loss: PolicyLossConfig = PpoLoss()
    """Loss of the policy."""
    kl: KlConfig = KlConfig()
    """The KL penalty towards the reference."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a bonus for the entropy of the policy."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
    ] = "sequence_mean_token_mean"
    """A mean over all tokens (DAPO); over the tokens of each sample and then over samples (GRPO); a sum over the tokens
    of each sample and a mean over samples; the same divided by `rollout.max_response_tokens` (Dr. GRPO)."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for samples that do not come from exactly the policy that is trained."""
    overlong: OverlongConfig = OverlongConfig()
    """Treatment of responses that are too long."""
    repeat: RepeatConfig = RepeatConfig()
    """Rounds that fill a step, in a workflow that repeats nodes."""
    critic: CriticConfig = CriticConfig()
    """Training of the critic, in a workflow with one."""

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmConfig:
        for refusal in refusals(self):
            raise ValueError(refusal)
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether anything depends on the reference's log-probabilities."""
        return self.kl.coefficient > 0


SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Losses that judge a response as a whole."""


def refusals(algorithm: AlgorithmConfig) -> list[str]:
    """Why an advantage, a loss, an aggregation and a penalty cannot be combined; empty if they can."""
    loss, advantage, kl = algorithm.policy_loss.type, algorithm.advantage.type, algorithm.kl
    found: list[str] = []
    if loss in SEQUENCE_LOSSES and algorithm.aggregation != "sequence_mean_token_mean":
        found.append(
            f"algorithm.aggregation={algorithm.aggregation} does not go with policy_loss.type={loss}, which is defined "
            "as a mean over responses: use sequence_mean_token_mean"
        )
    if loss == "gmpo" and algorithm.advantage.is_per_token:
        found.append(
            f"algorithm.policy_loss.type=gmpo needs one advantage for all tokens of a response, and "
            f"advantage.type={advantage} gives each token its own: use ppo, or another advantage"
        )
    found += algorithm.advantage.refusals(algorithm)
    if kl.place == "reward" and kl.unbiased_gradient:
        found.append("algorithm.kl.unbiased_gradient does nothing with kl.place=reward, as rewards have no gradient")
    if kl.target is not None and kl.coefficient == 0:
        found.append("algorithm.kl.target needs kl.coefficient > 0: a weight of 0 stays 0 whatever it is multiplied by")
    if algorithm.correction.lowest > algorithm.correction.highest:
        found.append("algorithm.correction.lowest is above highest, which would drop every token")
    if isinstance(algorithm.policy_loss, ClipCovLoss) and algorithm.policy_loss.lowest > algorithm.policy_loss.highest:
        found.append("algorithm.policy_loss.lowest is above highest, so that no token could be chosen")
    return found
