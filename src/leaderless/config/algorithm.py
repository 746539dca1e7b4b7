"""The algorithm: advantage, loss, penalties, correction, and how tokens are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from leaderless.config.base import Section
from leaderless.config.functions import is_function_name


def _type_or(default: str) -> Callable[[object], object]:
    """What names the section that settings belong to: their `type`, or that of the default."""
    return lambda value: value.get("type", default) if isinstance(value, Mapping) else getattr(value, "type", None)


class FunctionSection(Section):
    """A function of one's own."""

    function: str
    """`package.module:function`."""

    @field_validator("function")
    @classmethod
    def _is_function_name(cls, value: str) -> str:
        if not is_function_name(value):
            raise ValueError("must look like package.module:function")
        return value


class GrpoAdvantage(Section):
    """Rewards relative to their group: (r - mean) / std."""

    type: Literal["grpo"] = "grpo"
    """Which advantage."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation, as GRPO does; Dr. GRPO does not."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to that standard deviation."""


class RlooAdvantage(Section):
    """Rewards less the mean of the group's other rewards."""

    type: Literal["rloo"] = "rloo"
    """Which advantage."""


class OpoAdvantage(Section):
    """Rewards less the group's length-weighted mean."""

    type: Literal["opo"] = "opo"
    """Which advantage."""


class GpgAdvantage(Section):
    """Rewards less their group's mean, scaled up for groups without signal."""

    type: Literal["gpg"] = "gpg"
    """Which advantage."""


class CpgdAdvantage(Section):
    """Rewards less their group's mean, weighted up for groups without signal, to a limit."""

    type: Literal["cpgd"] = "cpgd"
    """Which advantage."""
    max_weight: float = Field(default=3.0, ge=1)
    """Largest weight."""


class PassAtKAdvantage(Section):
    """What a response adds to the best of k."""

    type: Literal["pass_at_k"] = "pass_at_k"
    """Which advantage."""
    k: int = Field(default=4, ge=1)
    """Responses of which the best counts; at most `batch.responses_per_prompt`."""
    correct_at: float = 1.0
    """A response is correct when its reward is at least this."""


class RemaxAdvantage(Section):
    """Rewards less that of the greedy response."""

    type: Literal["remax"] = "remax"
    """Which advantage."""


class ReinforceAdvantage(Section):
    """REINFORCE++: returns to go, whitened over all tokens of the step."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Which advantage."""
    group_baseline: bool = False
    """Subtract the group's mean reward first: REINFORCE++-baseline."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma: how much a reward counts one token earlier."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the standard deviation of the whitening."""


class GaeAdvantage(Section):
    """Generalised advantage estimation, with a critic."""

    type: Literal["gae"] = "gae"
    """Which advantage."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma: how much a reward counts one token earlier."""
    decay: float = Field(default=1.0, ge=0, le=1)
    """Lambda: 1 trusts rewards alone, 0 the critic's next value."""
    whiten: bool = True
    """Bring advantages to mean 0 and deviation 1 over all tokens of the step."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the standard deviation of the whitening."""


class DistillationAdvantage(Section):
    """How much likelier the teacher, `models.reference`, finds each token."""

    type: Literal["distillation"] = "distillation"
    """Which advantage."""


class RejectionAdvantage(Section):
    """1 for correct responses, 0 for all others."""

    type: Literal["rejection"] = "rejection"
    """Which advantage."""
    correct_at: float = 1.0
    """A response is correct when its reward is at least this."""


class FunctionAdvantage(FunctionSection):
    """A function of one's own: (rewards, reward_valid, response_lengths, group_ids) to [n] advantages."""

    type: Literal["function"] = "function"
    """Which advantage."""


Advantage = Annotated[
    Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[OpoAdvantage, Tag("opo")]
    | Annotated[GpgAdvantage, Tag("gpg")]
    | Annotated[CpgdAdvantage, Tag("cpgd")]
    | Annotated[PassAtKAdvantage, Tag("pass_at_k")]
    | Annotated[RemaxAdvantage, Tag("remax")]
    | Annotated[ReinforceAdvantage, Tag("reinforce_pp")]
    | Annotated[GaeAdvantage, Tag("gae")]
    | Annotated[DistillationAdvantage, Tag("distillation")]
    | Annotated[RejectionAdvantage, Tag("rejection")]
    | Annotated[FunctionAdvantage, Tag("function")],
    Discriminator(_type_or("grpo")),
]


class PpoLoss(Section):
    """The clipped ratio objective."""

    type: Literal["ppo"] = "ppo"
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio that a token of negative advantage is pushed down by; none when not given."""


class ReinforceLoss(Section):
    """The plain policy gradient, without ratio or clipping."""

    type: Literal["reinforce"] = "reinforce"
    """Which loss."""


class GspoLoss(Section):
    """The clipped objective with the ratio of whole responses."""

    type: Literal["gspo"] = "gspo"
    """Which loss."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""


class GmpoLoss(Section):
    """The geometric mean of the tokens' clipped ratios."""

    type: Literal["gmpo"] = "gmpo"
    """Which loss."""
    clip_low: float = Field(default=0.4, gt=0)
    """The log-ratio is clipped from below at -clip_low."""
    clip_high: float = Field(default=0.4, gt=0)
    """The log-ratio is clipped from above at clip_high."""


class CispoLoss(Section):
    """The policy gradient weighted with a clipped ratio."""

    type: Literal["cispo"] = "cispo"
    """Which loss."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """The ratio is clipped from below at 1 - clip_low; 1 leaves it open."""
    clip_high: float = Field(default=4.0, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""


class CpgdLoss(Section):
    """A clipped log-ratio, and a penalty for drifting from the old policy."""

    type: Literal["cpgd"] = "cpgd"
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The log-ratio is clipped from below at log(1 - clip_low)."""
    clip_high: float = Field(default=0.2, gt=0)
    """The log-ratio is clipped from above at log(1 + clip_high)."""
    drift_coefficient: float = Field(default=0.1, ge=0)
    """Weight of the penalty for policy drift."""
    drift_clip: float = Field(default=1.0, gt=0)
    """Largest factor in the penalty's gradient."""


class SapoLoss(Section):
    """A soft gate in place of clipping."""

    type: Literal["sapo"] = "sapo"
    """Which loss."""
    temperature_positive: float = Field(default=1.0, gt=0)
    """How fast the gate closes for tokens of positive advantage."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """How fast the gate closes for all others."""


class ClipCovLoss(Section):
    """The clipped ratio objective without the gradient of some tokens of high covariance."""

    type: Literal["clip_cov"] = "clip_cov"
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    fraction: float = Field(default=2e-4, gt=0, lt=1)
    """Share of all tokens that lose their gradient."""
    lowest: float = Field(default=1.0, gt=0)
    """Least covariance of such a token."""
    highest: float = Field(default=5.0, gt=0)
    """Largest covariance of such a token."""


class KlCovLoss(Section):
    """The ratio objective with a penalty at the tokens of highest covariance."""

    type: Literal["kl_cov"] = "kl_cov"
    """Which loss."""
    fraction: float = Field(default=2e-3, gt=0, lt=1)
    """Share of all tokens that are penalised."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty."""


class FunctionLoss(FunctionSection):
    """A function of one's own: (log_probs, old_log_probs, advantages, lengths) to the [total] losses of tokens."""

    type: Literal["function"] = "function"
    """Which loss."""


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
    """Weight of the penalty, at first if there is a target; 0 prunes the reference from the plan."""
    estimator: Literal["k1", "k2", "k3", "absolute"] = "k3"
    """How the divergence is estimated at each token."""
    unbiased_gradient: bool = False
    """Give the estimate the gradient of the divergence itself; in the loss only."""
    place: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the rewards."""
    target: float | None = Field(default=None, gt=0)
    """Adapt the weight in steps that train the policy, so that the mean divergence comes to this; it stays as it is
    when not given."""
    horizon: float = Field(default=10000.0, gt=0)
    """Samples over which an adapted weight can change by about a fifth."""


class CorrectionConfig(Section):
    """Weights for tokens that the engine sampled with another probability than the trainer gives them.

    They multiply the policy loss alone, not the KL penalty or the entropy bonus. Tokens that are dropped have weight 0,
    and still count in the denominators of the mean.
    """

    type: Literal["none", "truncate", "mask", "reject"] = "none"
    """`truncate` cuts the ratio of the two probabilities at `highest`, `mask` drops what is outside the range, `reject`
    drops it too and leaves the rest without a weight."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """A ratio for each token, for the whole response, or the geometric mean of its tokens'."""
    lowest: float = Field(default=0.5, ge=0)
    """Least ratio that `mask` and `reject` keep."""
    highest: float = Field(default=2.0, gt=0)
    """Largest ratio that `mask` and `reject` keep, and that `truncate` gives."""


class OverlongConfig(Section):
    """What becomes of responses that are too long."""

    buffer_tokens: int = Field(default=0, ge=0)
    """Over the last so many tokens before `rollout.max_response_tokens` the reward falls by up to 1; 0 leaves it."""
    filter: bool = False
    """Truncated responses carry no gradient."""


class LoopConfig(Section):
    """How a workflow with a loop fills its steps: it asks new prompts until enough groups have a signal."""

    max_rounds: int = Field(default=8, ge=1)
    """Most rounds of `batch.prompts_per_step` prompts each in a step."""
    on_exhausted: Literal["train", "stop"] = "train"
    """What happens when the last round leaves too few groups: train with those there are, or stop with an error. It
    always stops when there is none."""


class CriticConfig(Section):
    """How the critic is trained."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Furthest that a value moves in one step's updates without penalty; no limit when null."""
    warmup_steps: int = Field(default=0, ge=0)
    """In the first so many steps only the critic is trained."""


class AlgorithmConfig(Section):
    """Advantage, loss, penalties, correction, and how tokens are averaged."""

    advantage: Advantage = GrpoAdvantage()
    """How rewards become advantages."""
    policy_loss: PolicyLossConfig = PpoLoss()
    """What is minimised."""
    kl: KlConfig = KlConfig()
    """The KL penalty towards the reference."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a bonus for the entropy of the policy."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
    ] = "sequence_mean_token_mean"
    """Over all tokens alike (DAPO); over the tokens of a sample and then over samples (GRPO); a sum over a sample's
    tokens, and a mean over samples; the same divided by `rollout.max_response_tokens` (Dr. GRPO)."""
    correction: CorrectionConfig = CorrectionConfig()
    """For samples that do not come from the policy that is trained."""
    overlong: OverlongConfig = OverlongConfig()
    """What becomes of responses that are too long."""
    loop: LoopConfig = LoopConfig()
    """How many rounds it may take to fill a step, where the workflow has a loop."""
    critic: CriticConfig = CriticConfig()
    """How the critic is trained, where there is one."""

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
TOKEN_ADVANTAGES = ("gae", "reinforce_pp", "distillation")
"""Advantages that differ from token to token."""


def refusals(algorithm: AlgorithmConfig) -> list[str]:
    """Why an advantage, a loss, an aggregation and a penalty do not go together; empty when they do.

    Args:
        algorithm: Of a recipe.
    """
    loss, advantage, kl = algorithm.policy_loss.type, algorithm.advantage.type, algorithm.kl
    found: list[str] = []
    if loss in SEQUENCE_LOSSES and algorithm.aggregation != "sequence_mean_token_mean":
        found.append(
            f"algorithm.aggregation={algorithm.aggregation} does not go with policy_loss.type={loss}, which is defined "
            "as a mean over responses: use sequence_mean_token_mean"
        )
    if loss == "gmpo" and advantage in TOKEN_ADVANTAGES:
        found.append(
            f"algorithm.policy_loss.type=gmpo needs one advantage for all tokens of a response, and "
            f"advantage.type={advantage} gives each token its own: use ppo, or another advantage"
        )
    if kl.place == "reward" and advantage in {"pass_at_k", "rejection"}:
        found.append(
            f"algorithm.kl.place=reward does not go with advantage.type={advantage}, which asks whether a response is "
            "correct: use kl.place=loss"
        )
    if kl.place == "reward" and advantage == "distillation":
        found.append(
            "algorithm.kl.place=reward does nothing with advantage.type=distillation, which looks at no reward: "
            "use kl.place=loss"
        )
    if algorithm.overlong.buffer_tokens and advantage in {"pass_at_k", "rejection", "distillation"}:
        looks = "looks at no reward" if advantage == "distillation" else "asks whether a response is correct"
        found.append(
            f"algorithm.overlong.buffer_tokens does not go with advantage.type={advantage}, which {looks}: leave it "
            "out, or use overlong.filter"
        )
    if kl.place == "reward" and kl.unbiased_gradient:
        found.append("algorithm.kl.unbiased_gradient does nothing with kl.place=reward, as rewards have no gradient")
    if kl.target is not None and kl.coefficient == 0:
        found.append("algorithm.kl.target needs kl.coefficient > 0: a weight of 0 stays 0 whatever it is multiplied by")
    if algorithm.correction.lowest > algorithm.correction.highest:
        found.append("algorithm.correction.lowest is above highest, which would drop every token")
    if isinstance(algorithm.policy_loss, ClipCovLoss) and algorithm.policy_loss.lowest > algorithm.policy_loss.highest:
        found.append("algorithm.policy_loss.lowest is above highest, so that no token could be chosen")
    return found
