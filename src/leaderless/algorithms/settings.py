"""The algorithm: advantage, loss, penalties, correction, and how tokens are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from leaderless.algorithms.advantage import Advantage
from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.advantages.grpo import GrpoAdvantage
from leaderless.algorithms.algorithm import union_of
from leaderless.algorithms.divergences import Divergence, DivergenceKind, Tail
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.losses.ppo import PpoLoss
from leaderless.algorithms.policy_loss import PolicyLoss
from leaderless.algorithms.preference_loss import PreferenceLoss
from leaderless.algorithms.preferences import PREFERENCE_LOSSES
from leaderless.algorithms.preferences.sigmoid import SigmoidLoss
from leaderless.base.section import Section

if TYPE_CHECKING:
    AnyAdvantage = Advantage
    AnyPolicyLoss = PolicyLoss
    AnyPreferenceLoss = PreferenceLoss
else:
    AnyAdvantage = union_of(ADVANTAGES, Advantage, default="grpo")
    AnyPolicyLoss = union_of(POLICY_LOSSES, PolicyLoss, default="ppo")
    AnyPreferenceLoss = union_of(PREFERENCE_LOSSES, PreferenceLoss, default="sigmoid")


class KlConfig(Section):
    """The KL penalty towards the reference."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty, with a target the initial one; 0 removes the reference from the plan."""
    estimator: Literal["k1", "k2", "k3", "absolute"] = "k3"
    """Estimator of the divergence at each token; in the reward `k1`, by default and alone."""
    unbiased_gradient: bool = False
    """Give the estimate the gradient of the divergence itself; only for `place: loss`."""
    place: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the rewards."""
    target: float | None = Field(default=None, gt=0)
    """Mean divergence that the weight is adapted to reach, in steps that train the policy; by default the weight is
    constant."""
    horizon: float = Field(default=10000.0, gt=0)
    """Number of episodes over which an adapted weight can change by about a fifth."""

    @model_validator(mode="before")
    @classmethod
    def _fits_its_place(cls, value: object) -> object:
        if isinstance(value, Mapping) and value.get("place") == "reward":
            return {"estimator": "k1", **value}
        return value


class CorrectionConfig(Section):
    """Weights for tokens whose probability under the trainer differs from the engine's at sampling time.

    They multiply the policy loss only, not the KL penalty or the entropy bonus. Dropped tokens have weight 0 and still
    count in the denominator of the mean.
    """

    type: Literal["auto", "none", "truncate", "mask", "reject"] = "auto"
    """`truncate` limits the ratio of the two probabilities to `highest`, `mask` drops ratios outside the range, and
    `reject` does the same but gives the others weight 1. `auto` is `truncate` where the engine that samples computes in
    a format of [low precision](../guides/low-precision.md) and the policy loss does not compare with that engine
    itself, and else `none`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One ratio per token, or per sample: the product or the geometric mean of its tokens' ratios."""
    lowest: float = Field(default=0.5, ge=0)
    """Smallest ratio that `mask` and `reject` keep."""
    highest: float = Field(default=2.0, gt=0)
    """Largest ratio that `mask` and `reject` keep, and limit of `truncate`."""

    @property
    def has_weights(self) -> bool:
        """Whether tokens have other weights than 1; what `auto` means for a role is settled by `Recipe.as_seen_by`."""
        return self.type not in {"auto", "none"}


class OverlongConfig(Section):
    """Treatment of responses that are too long."""

    buffer_tokens: int = Field(default=0, ge=0)
    """Number of tokens before `rollout.max_response_tokens` over which the reward falls by up to 1; 0 for none. Of an
    episode with several messages, the longest one counts."""
    filter: bool = False
    """Give truncated responses no gradient, in the policy and in a critic."""


class RepeatConfig(Section):
    """How repeated nodes fill a step: with rounds of new prompts, until enough groups have a signal."""

    max_rounds: int = Field(default=8, ge=1)
    """Largest number of rounds in a step, of `batch.prompts_per_step` prompts each."""
    on_exhausted: Literal["train", "stop"] = "train"
    """If there are too few groups after the last round, train on them, or stop with an error. Without any group, the
    run stops in either case."""


class RewardModelConfig(Section):
    """Training of a reward model, and its part in the reward of a response."""

    centering: float = Field(default=0.0, ge=0)
    """Weight of a term that pulls the mean score of both responses of a pair to 0; only differences matter else."""
    weight: float = 1.0
    """Weight of its score in the sample's reward, next to the rewards of earlier nodes."""


class SacConfig(Section):
    """Settings of SAC; with demonstrations it is RLPD."""

    batch_size: int = Field(default=256, ge=2)
    """Transitions of an update, on all ranks together; half of them demonstrations, if there are any."""
    updates_per_decision: float = Field(default=1.0, gt=0)
    """Updates of the policy for each decision that is recorded."""
    critic_updates: int = Field(default=4, ge=1)
    """Updates of the critics for one of the policy."""
    first_decisions: int = Field(default=64, ge=1)
    """Decisions that are recorded before the first update."""
    num_heads: int = Field(default=10, ge=1)
    """Number of critics."""
    subset_size: int = Field(default=2, ge=1)
    """Critics, drawn for each update, whose least value is the target of all."""
    discount: float = Field(default=0.97, gt=0, le=1)
    """Gamma, per step of the environment."""
    target_rate: float = Field(default=0.01, gt=0, le=1)
    """Share of the critics that goes into the slow ones at each update."""
    first_temperature: float = Field(default=0.01, gt=0)
    """Weight of the entropy at first; later it is tuned."""
    target_entropy: float = -0.5
    """Entropy that the temperature is tuned for, in nats per number of an action, where actions go from -1 to 1."""
    is_entropy_valued: bool = False
    """Whether entropy to come is part of the critics' values."""
    hidden_size: int = Field(default=64, ge=1)
    """Width of the critics' hidden layers."""
    num_layers: int = Field(default=2, ge=1)
    """Number of the critics' hidden layers."""

    @model_validator(mode="after")
    def _subset_is_one(self) -> Self:
        if self.subset_size > self.num_heads:
            raise ValueError(f"subset_size={self.subset_size}: must be at most num_heads={self.num_heads}")
        return self


class TeamConfig(Section):
    """Training of several roles that play together."""

    rotate_steps: int = Field(default=0, ge=0)
    """Number of steps after which the next of the roles that sample is trained; 0 trains all of them in every step."""
    max_ratio: float = Field(default=2.0, gt=1)
    """Limit of the ratio by which a role's update scales the advantages of roles that are updated after it: it is
    between 1 / `max_ratio` and `max_ratio`. Only in workflows that update one role after the other, as `happo` does."""


class CriticConfig(Section):
    """Training of the critic."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Largest change of a value in one step's updates; null for no limit."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps in which only the critic is trained."""


class TeacherContextConfig(Section):
    """What a teacher is shown that the student is not: it reads the same responses after a prompt of its own."""

    template: str = Field(min_length=1)
    """Text of the teacher's prompt: `{prompt}` is that of the student, and other columns of the row are in braces, such
    as `{answer}`. In a conversation it takes the place of the last message."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt of the teacher. A row with a longer one has no teacher."""

    @model_validator(mode="after")
    def _shows_more(self) -> Self:
        fields = {name for _, name, _, _ in Formatter().parse(self.template) if name}
        if not fields - {"prompt"}:
            raise ValueError(
                f"template={self.template!r}: names no column besides the prompt, so that the teacher would know no "
                "more than the student: name one in braces, such as {answer}"
            )
        return self


class TeacherServerConfig(Section):
    """A teacher behind an address: a server with OpenAI's API that gives log-probabilities of prompts, as vLLM's."""

    url: str = Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """Address of the server, such as `http://127.0.0.1:8000/v1`, to which `/completions` is added."""
    model: str = Field(min_length=1)
    """Name that the server has for the model."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that has the key of the server; the key itself is never in a recipe."""
    max_requests: int = Field(default=16, ge=1)
    """Number of requests that each worker makes at a time."""
    retries: int = Field(default=3, ge=0)
    """Number of times that a request is repeated after a failure; then the run stops."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that the server may take for a request."""


class DistillationConfig(Section):
    """How a student learns the distributions of a teacher at the tokens that it has sampled."""

    divergence: DivergenceKind = "reverse_kl"
    """Divergence of the student from the teacher at each token."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of `jensen_shannon`: near 0 it is like `forward_kl`, near 1 like
    `reverse_kl`, apart from its size."""
    top_k: int | None = Field(default=None, ge=1)
    """Number of likeliest words that the teacher gives for each token, in addition to the token itself; null to compare
    all words, for which the teacher is on the ranks that train the student."""
    tail: Tail = "bucket"
    """Treatment of words that the teacher does not give: they are one more word, or none."""
    temperature: float = Field(default=1.0, gt=0)
    """Number that divides the logits of both models."""
    align: Literal["tokens", "text"] = "tokens"
    """What is the same for both models: their tokens, or only the text that these stand for, so that the teacher may
    have another tokenizer."""
    teacher: str = "reference"
    """Role of the teacher; with a `context` it may be the role that is trained."""
    teachers: Mapping[str, str] = {}
    """Role of the teacher of the rows of each source, in place of `teacher`. A row's source is in the column
    `data.train.source`, or the name of its dataset in a mixture."""
    context: TeacherContextConfig | None = None
    """What the teacher is shown that the student is not; by default nothing."""
    server: TeacherServerConfig | None = None
    """A server that is the teacher, in place of a role."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.beta != 0.5 and self.divergence != "jensen_shannon":
            raise ValueError(
                f"beta={self.beta} does nothing with divergence={self.divergence}: set it to jensen_shannon, or leave "
                "beta out"
            )
        if self.tail != "bucket" and self.top_k is None:
            raise ValueError(f"tail={self.tail} does nothing where all words are compared: set top_k, or leave it out")
        for name, is_given in (
            ("teachers", bool(self.teachers)),
            ("context", self.context is not None),
            ("server", self.server is not None),
            ("align=text", self.align == "text"),
        ):
            if is_given and self.top_k is None:
                raise ValueError(
                    f"{name} needs words that teachers give, but top_k=null compares all: set top_k, such as 64"
                )
        if self.server is not None and self.temperature != 1 and self.tail != "renormalize":
            raise ValueError(
                f"temperature={self.temperature} needs logits, but a server gives probabilities at 1: set "
                "tail=renormalize, with which these suffice, or leave it out"
            )
        if self.server is not None and self.align == "text":
            raise ValueError(
                "align=text needs the tokenizer of the teacher, which a server does not give: name a role as teacher, "
                "or a server whose model has the student's tokenizer"
            )
        if self.server is not None and (self.teachers or self.teacher != "reference"):
            raise ValueError("server is the teacher of all rows: leave out teacher and teachers")
        if self.teachers and self.teacher != "reference":
            raise ValueError(f"teacher={self.teacher} does nothing where teachers are given: leave one of them out")
        return self

    @property
    def reads_rows(self) -> bool:
        """Whether teachers have prompts of their own, made from rows."""
        return self.context is not None or self.align == "text"

    @property
    def measured(self) -> Divergence:
        """The divergence."""
        return Divergence(self.divergence, self.beta, self.temperature, self.tail)


class AlgorithmConfig(Section):
    """Advantage, loss, penalties, correction, and how tokens are averaged."""

    advantage: AnyAdvantage = GrpoAdvantage()
    """Advantage computed from rewards."""
    policy_loss: AnyPolicyLoss = PpoLoss()
    """Loss of the policy."""
    preference_loss: AnyPreferenceLoss = SigmoidLoss()
    """Loss of preferences, in a workflow that learns from them."""
    kl: KlConfig = KlConfig()
    """The KL penalty towards the reference."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of a bonus for the entropy of the policy."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
    ] = "sequence_mean_token_mean"
    """A mean over all tokens (DAPO); over the tokens of each episode and then over episodes (GRPO); a sum over the
    tokens of each episode and a mean over episodes; the same divided by `rollout.max_response_tokens` (Dr. GRPO)."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for samples that do not come from exactly the policy that is trained."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Log-probabilities before the updates of a step, from which ratios are taken: `recomputed` by a pass over the
    samples, or `interpolated` between the sampling engine's and the current ones, by the number of updates
    that lie between (A-3PO)."""
    replay_experts: bool = False
    """Let a model with experts use for each token those that the engine chose when it sampled, with weights of its own
    (R3). Otherwise some tokens go through other experts in training than in generation."""
    expert_balance: float = Field(default=0.0, ge=0)
    """Weight of a loss that makes the loads of experts equal, over all sampled tokens of an update; it takes one more
    pass over the samples. 0 for none."""
    overlong: OverlongConfig = OverlongConfig()
    """Treatment of responses that are too long."""
    repeat: RepeatConfig = RepeatConfig()
    """Rounds that fill a step, in a workflow that repeats nodes."""
    critic: CriticConfig = CriticConfig()
    """Training of the critic, in a workflow with one."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Training and use of a reward model, in a workflow with one."""
    team: TeamConfig = TeamConfig()
    """Training of several roles that play together."""
    distillation: DistillationConfig = DistillationConfig()
    """What a student learns from a teacher, in a workflow that compares their distributions, such as `gkd`."""
    sac: SacConfig | None = None
    """Soft actor-critic, in workflows that train by it, such as `sac`."""

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmConfig:
        for refusal in refusals(self):
            raise ValueError(refusal)
        return self

    def corrected(self) -> AlgorithmConfig:
        """The same, where `auto` has become the correction for an engine of low precision, if the loss takes one."""
        if self.correction.type != "auto":
            return self
        truncated = self.correction.model_copy(update={"type": "truncate"})
        found = self.model_copy(update={"correction": truncated})
        return self if [*found.policy_loss.refusals(found)] else found

    @property
    def uses_reference(self) -> bool:
        """Whether anything depends on the reference's log-probabilities."""
        return self.kl.coefficient > 0

    @property
    def is_penalized_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss."""
        return self.uses_reference and self.kl.place == "loss"

    @property
    def is_penalized_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the rewards."""
        return self.uses_reference and self.kl.place == "reward"


def refusals(algorithm: AlgorithmConfig) -> list[str]:
    """Why an advantage, a loss, an aggregation and a penalty cannot be combined; empty if they can."""
    kl = algorithm.kl
    parts = (algorithm.policy_loss, algorithm.advantage, algorithm.preference_loss)
    found = [reason for part in parts for reason in part.refusals(algorithm)]
    if kl.place == "reward" and kl.unbiased_gradient:
        found.append("algorithm.kl.unbiased_gradient does nothing with kl.place=reward, as rewards have no gradient")
    if kl.place == "reward" and kl.estimator != "k1":
        found.append(
            f"algorithm.kl.estimator={kl.estimator} with kl.place=reward does not hold the policy near the reference: "
            "only k1 has the gradient of the divergence there; leave it out, or use kl.place=loss"
        )
    if algorithm.is_penalized_in_loss and kl.estimator == "k1" and not kl.unbiased_gradient:
        found.append(
            "algorithm.kl.estimator=k1 with kl.place=loss has a gradient of 0 on average, which holds nothing: use k2, "
            "set kl.unbiased_gradient, or use kl.place=reward"
        )
    if kl.target is not None and kl.coefficient == 0:
        found.append("algorithm.kl.target needs kl.coefficient > 0: a weight of 0 stays 0 whatever it is multiplied by")
    if algorithm.proximal == "interpolated" and algorithm.is_penalized_in_reward:
        found.append(
            "algorithm.proximal=interpolated saves nothing with kl.place=reward, whose penalty is taken from the "
            "recomputed log-probabilities: use kl.place=loss, or proximal=recomputed"
        )
    if algorithm.correction.lowest > algorithm.correction.highest:
        found.append("algorithm.correction.lowest is above highest, which would drop every token")
    return found
