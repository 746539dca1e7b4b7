"""Failed, filtered and greedy rows do not affect training, metrics or other rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from tests.tiny import random_samples
from tests.unit.recipes import make_recipe
from tests.unit.stages.test_critic_stage import Table as Critic
from tests.unit.stages.test_decoupled_ppo import Table
from torch import Tensor

from leaderless.algorithms import (
    Advantage,
    AdvantageInputs,
    AdvantageOutput,
    LossInputs,
    LossOutput,
    PolicyLoss,
    adapted_coefficient,
)
from leaderless.algorithms.advantages import ADVANTAGES as BUILT_IN
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.scoring import Entropy
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.rewards.pool import Graded
from leaderless.rollout.engine import Completion
from leaderless.stages import rollout
from leaderless.stages.advantage import advantage, remax
from leaderless.stages.context import Grader, ModelRole, StageContext
from leaderless.stages.mini_batches import KL_STATE
from leaderless.stages.reward import reward
from leaderless.stages.update import update, update_critic
from leaderless.training.engine import TrainEngine
from leaderless.training.micro_batches import MicroBatch

LENGTHS = [(2, 3), (2, 4), (2, 2), (2, 5)]
"""Prompt and response tokens of the four responses to one prompt."""
FAILED = 1
GROUP = ProcessGroup((0,), 0)
PER_TOKEN = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "returns")


def numbers(seed: int) -> Tensor:
    return 0.1 * torch.randn(sum(after for _, after in LENGTHS), generator=torch.Generator().manual_seed(seed)) - 1


def samples(*, poison: float | None = None, truncated: tuple[int, ...] = ()) -> Batch:
    """Responses of which one failed, with NaN or another number in all of its columns."""
    lengths = torch.tensor([after for _, after in LENGTHS])
    is_failed = torch.arange(len(LENGTHS)) == FAILED
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0])
    columns = {name: numbers(seed) for seed, name in enumerate(PER_TOKEN)}
    if poison is not None:
        rewards = torch.where(is_failed, poison, rewards)
        of_failed = is_failed.repeat_interleave(lengths)
        columns = {name: torch.where(of_failed, poison, values) for name, values in columns.items()}
    return random_samples(LENGTHS, siblings=4).with_columns(
        response_lengths=lengths,
        reward_valid=~is_failed,
        rewards=rewards,
        truncated=torch.tensor([row in truncated for row in range(len(LENGTHS))]),
        policy_versions=Jagged(torch.full((int(lengths.sum()),), 3), lengths, "response_tokens"),
        **{name: Jagged(values, lengths, "response_tokens") for name, values in columns.items()},
    )


def context_of(
    node: str, algorithm: Mapping[str, Any], workflow: str = "grpo", model: object = None, **state: float
) -> StageContext:
    resolved = resolve_workflow(workflow)
    settings = {**resolved.algorithm, **algorithm}
    recipe = make_recipe(
        algorithm=settings, rollout={"max_response_tokens": 5}, models={"policy": "p", "reference": "p"}
    )
    return StageContext(
        recipe=recipe,
        node=make_plan(recipe, resolved, Cluster(1))[node],
        step=1,
        process_group=GROUP,
        metrics=Metrics(),
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=cast("Any", model),
        grade=cast("Grader", None),
        agents=("policy",),
        state=state,
    )


def trained(batch: Batch, algorithm: Mapping[str, Any], scores: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The gradient of an update, and its metrics."""
    policy = Table(scores)
    context = context_of("policy", algorithm, model=ModelRole(cast("TrainEngine", policy), None))
    update(batch, context)
    assert policy.log_probs.grad is not None
    return policy.log_probs.grad, context.metrics.reduce(GROUP)


KL = {"coefficient": 0.3}
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"policy_loss": {"type": kind}, "kl": KL} for kind in ("ppo", "reinforce", "gspo", "gmpo", "cispo")},
    **{kind: {"policy_loss": {"type": kind}, "kl": KL} for kind in ("cpgd", "sapo", "clip_cov", "kl_cov", "dppo")},
    **{kind: {"policy_loss": {"type": kind}, "kl": KL} for kind in ("topr", "vespo")},
    "m2po": {"policy_loss": {"type": "m2po", "threshold": 1e-3}, "kl": KL},
    **{
        f"{kind} {level}": {"correction": {"type": kind, "level": level}, "entropy_coefficient": 0.1}
        for kind in ("truncate", "mask", "reject")
        for level in ("token", "sequence", "geometric")
    },
    "unbiased kl": {"kl": KL | {"unbiased_gradient": True, "target": 0.1}},
}


@pytest.mark.parametrize("poison", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.thorough), 7.0])
@pytest.mark.parametrize("case", CASES)
def test_what_stands_in_a_failed_row_changes_neither_gradient_nor_metrics(case, poison):
    scores = numbers(9)
    expected = trained(samples(), CASES[case], scores)
    of_failed = slice(3, 7)
    poisoned = scores.clone()
    poisoned[of_failed] = poison
    result = trained(samples(poison=poison), CASES[case], poisoned)
    assert torch.equal(result[0], expected[0])
    assert result[1] == expected[1]
    assert float(expected[0].abs().max()) > 0
    assert not expected[0][of_failed].any()


class ConstantLoss(PolicyLoss):
    """A loss that depends on no probability."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        return LossOutput.without_clipping(inputs.advantages)


def test_a_loss_that_depends_on_no_output_still_has_a_backward_pass() -> None:
    # Other ranks may have a loss that does, and their backward pass is collective.
    algorithm = {"policy_loss": {"type": f"{__name__}:ConstantLoss"}}
    batch = samples()
    batch = batch.only(name for name in batch.names() if name != "ref_log_probs")
    gradient, _ = trained(batch, algorithm, numbers(9))
    assert not gradient.any()


class ReadsReference(PolicyLoss):
    """A loss that reads what a KL penalty would."""

    reads: ClassVar[tuple[str, ...]] = ("ref_log_probs",)

    def compute(self, inputs: LossInputs) -> LossOutput:
        return LossOutput.without_clipping(-inputs.log_probs * inputs.columns["ref_log_probs"])


def test_a_loss_that_reads_the_reference_is_no_penalty() -> None:
    _, metrics = trained(samples(), {"policy_loss": {"type": f"{__name__}:ReadsReference"}}, numbers(9))
    assert metrics["policy/grad_norm"] >= 0
    assert "policy/kl" not in metrics
    _, metrics = trained(samples(), {"policy_loss": {"type": f"{__name__}:ReadsReference"}, "kl": KL}, numbers(9))
    assert "policy/kl" in metrics


def advantages_of(batch: Batch, algorithm: Mapping[str, Any]) -> tuple[Tensor, dict[str, float], float]:
    workflow = "ppo" if algorithm["advantage"]["type"] == "gae" else "grpo"
    context = context_of("advantage", algorithm, workflow)
    values = advantage(batch, context).jagged("advantages").values
    return values, context.metrics.reduce(GROUP), context.state.get("kl_coefficient", 0.0)


IN_REWARD = {"coefficient": 0.3, "place": "reward", "estimator": "k1", "target": 0.1}
OF_BODIES = ("body_gae", "srpo")
"""Advantages of bodies, whose episodes have columns of their own; see `tests/unit/embodied`."""
ADVANTAGES = {
    **{kind: {"advantage": {"type": kind}, "kl": IN_REWARD} for kind in ("grpo", "rloo", "opo", "gpg", "cpgd", "gae")},
    "reinforce_pp": {"advantage": {"type": "reinforce_pp"}, "kl": IN_REWARD, "overlong": {"buffer_tokens": 3}},
    "pass_at_k": {"advantage": {"type": "pass_at_k", "k": 2}},
    "maxrl": {"advantage": {"type": "maxrl"}},
    "rejection": {"advantage": {"type": "rejection"}},
    "distillation": {"advantage": {"type": "distillation"}, "kl": KL},
    "custom": {"advantage": {"type": f"{__name__}:MeanOfAll"}, "kl": IN_REWARD},
}


class MeanOfAll(Advantage):
    """An advantage that also looks at failed rows, where rewards must be 0."""

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        return AdvantageOutput(inputs.rewards - inputs.rewards.mean())


@pytest.mark.parametrize("case", ADVANTAGES)
def test_what_stands_in_a_failed_row_changes_no_advantage(case):
    expected = advantages_of(samples(poison=7.0), ADVANTAGES[case])
    result = advantages_of(samples(poison=float("nan")), ADVANTAGES[case])
    assert torch.equal(result[0], expected[0])
    assert result[1:] == expected[1:]
    assert not result[0].isnan().any()


OF_TEAMS = {"chained_gae", "dr_mas", "magrpo", "rae"}
"""Advantages that read which agent said what; tests/contracts/test_advantages.py has failed rewards for them, too."""


OF_PARTS = {"gdpo"}
"""Advantages that read each reward on its own; tests/unit/algorithms/test_gdpo.py has failed rewards for them, too."""


def test_every_advantage_is_tried():
    assert {*BUILT_IN, "custom"} == {*ADVANTAGES, *OF_TEAMS, *OF_BODIES, *OF_PARTS, "remax"}


def test_a_filtered_response_is_left_out_of_the_denominator_of_rejection():
    filtered = {"advantage": {"type": "rejection"}, "overlong": {"filter": True}}
    values, _, _ = advantages_of(samples(truncated=(3,)), filtered)
    # Of the three responses that did not fail, of 3, 2 and 5 tokens, the last is filtered, and the first is correct.
    assert values[:3].tolist() == pytest.approx([5 / 3] * 3)


def test_a_filtered_response_does_not_train_the_critic():
    filtered = {"overlong": {"filter": True}}
    critic = Critic(numbers(9))
    context = context_of("critic", filtered, "ppo", model=critic)
    update_critic(samples(truncated=(3,)), context)
    assert critic.numbers.grad is not None
    assert [bool(row.any()) for row in critic.numbers.grad.split([3, 4, 2, 5])] == [True, False, True, False]


def test_the_critic_reads_which_responses_are_filtered():
    workflow = resolve_workflow("ppo")
    recipe = make_recipe(algorithm={**workflow.algorithm, "overlong": {"filter": True}})
    assert "truncated" in make_plan(recipe, workflow, Cluster(1))["critic"].reads


def test_remax_reports_the_divergence_of_responses_that_train():
    algorithm = {"kl": IN_REWARD | {"horizon": 10.0}, "overlong": {"buffer_tokens": 3}}
    is_greedy = torch.tensor([False, False, False, True])
    batch = samples().with_columns(is_greedy=is_greedy, reward_valid=torch.ones(4, dtype=torch.bool))
    context = context_of("advantage", algorithm, "remax")
    remax(batch, context)
    divergence = float((numbers(2) - numbers(3))[:9].mean())
    reported = context.metrics.reduce(GROUP)
    assert reported["reward/kl"] == pytest.approx(divergence)
    # Of 5 tokens at most, the last 3 are penalized: responses of 3, 4 and 2 tokens.
    assert reported["reward/overlong_penalty"] == pytest.approx((-1 / 3 - 2 / 3 + 0) / 3)
    adapted = adapted_coefficient(0.3, divergence, target=0.1, horizon=10.0, num_episodes=3)
    assert context.state[KL_STATE] == pytest.approx(adapted)
    lengths = batch.dense("response_lengths")
    far = Jagged(numbers(3) - 100.0 * is_greedy.repeat_interleave(lengths), lengths, "response_tokens")
    other = context_of("advantage", algorithm, "remax")
    remax(batch.with_columns(ref_log_probs=far), other)
    assert other.state == context.state, "the weight adapts to the responses that train"


@pytest.mark.parametrize("kind", ["gae", "reinforce_pp"])
def test_whitening_leaves_out_responses_that_are_filtered_out_of_the_loss(kind):
    algorithm = {"advantage": {"type": kind}, "overlong": {"filter": True}}
    values, _, _ = advantages_of(samples(truncated=(3,)), algorithm)
    first, failed, third, filtered = values.split([3, 4, 2, 5])
    whitened = torch.cat([first, third])
    assert float(whitened.mean()) == pytest.approx(0, abs=1e-6)
    assert float(whitened.std()) == pytest.approx(1, abs=1e-6)
    assert not torch.cat([failed, filtered]).any()
    workflow = resolve_workflow("ppo" if kind == "gae" else "grpo")
    recipe = make_recipe(algorithm={**workflow.algorithm, **algorithm})
    assert "truncated" in make_plan(recipe, workflow, Cluster(1))["advantage"].reads


def test_the_guard_of_entropy_looks_at_tokens_that_train():
    class Uncertain(Table):
        def forward(self, micro_batch: MicroBatch, entropy: Entropy) -> TokenOutputs:
            outputs = super().forward(micro_batch, entropy)
            of_failed = (micro_batch.response_index >= 3) & (micro_batch.response_index < 7)
            return TokenOutputs(outputs.log_probs, torch.where(of_failed, 9.0, 0.25))

    context = context_of("policy", {}, model=ModelRole(cast("TrainEngine", Uncertain(numbers(9))), None))
    context = replace(context, recipe=make_recipe(guards={"entropy_limit": 1.0}))
    update(samples(), context)
    (event,) = context.events
    assert (event.guard, event.value) == ("entropy_limit", 0.25)
    context.events.clear()
    update(samples().with_columns(reward_valid=torch.zeros(4, dtype=torch.bool)), context)
    assert not context.events, "no token says anything about the entropy"


def test_remax_reports_the_rewards_of_responses_that_train():
    graded = [Graded(value, value >= 0, {"math": {"value": value}}) for value in (1.0, 0.0, -1.0, 4.0)]
    context = replace(
        context_of("reward", {}, "remax"),
        tokenizer=cast("Tokenizer", SimpleNamespace(decode=lambda *_, **__: "")),
        grade=lambda *_: graded,
        run_directory=cast("RunDirectory", None),
    )
    rows = tuple({"question": "1+1=", "answer": "2"} for _ in LENGTHS)
    batch = samples().with_columns(is_greedy=torch.arange(4) == 3, rows=rows)
    reward(batch, context)
    reported = context.metrics.reduce(GROUP)
    assert (reported["reward/mean"], reported["reward/std"]) == (0.5, 0.5)
    assert reported["reward/math"] == pytest.approx(0)
    assert reported["reward/failed"] == 1
    assert "is_greedy" in context.node.reads


def test_remax_reports_the_lengths_of_responses_that_train():
    completions = [Completion([7] * n, [0.0] * n, "stop", [3] * n) for n in (*[2, 3] * 4, 9)]
    completions[-1].finish_reason = "length"
    context = context_of("rollout", {}, "remax", model=ModelRole(cast("TrainEngine", Table(numbers(9))), None))
    distributions = rollout.distributions_of(context.recipe, has_greedy=True)
    made = rollout.samples_of(completions, random_samples([(2, 0)]), context, distributions, 1.0)
    assert made.dense("is_greedy").tolist() == [*[False] * 8, True]
    reported = context.metrics.reduce(GROUP)
    assert (reported["rollout/response_tokens"], reported["rollout/truncated"]) == (2.5, 0)
