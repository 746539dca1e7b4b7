"""The stage that trains a critic: which tokens count, what it reports, and how it follows the policy's mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from tests.tiny import random_samples
from tests.unit.recipes import make_recipe
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.stages.context import Grader, StageContext
from leaderless.stages.update import update_critic, values
from leaderless.training.engine import UpdateInfo, ValueEngine
from leaderless.training.forward_passes import BoundedPasses
from leaderless.training.micro_batches import MicroBatch

LENGTHS = [(2, 3), (1, 4), (3, 0), (2, 2)]
GROUP = ProcessGroup((0,), 0)


class Table(BoundedPasses):
    """A critic with one number per token, which records its calls."""

    policy_version = 0

    def __init__(self, numbers: Tensor) -> None:
        super().__init__(GROUP, torch.device("cpu"), 8)
        self.numbers = numbers.clone().requires_grad_()
        self.updates: list[list[int]] = []

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        self.updates.append(batch.ids.tolist())
        return super().micro_batches(batch)

    def values(self, batch: Batch) -> Jagged:
        return Jagged(self.numbers.detach(), batch.dense("response_lengths"), "response_tokens")

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        return self.numbers[micro_batch.response_index]

    def discard_gradient(self) -> None:
        pass  # of several updates, the gradients add up

    def optimizer_step(self, allow: Callable[[float], bool]) -> UpdateInfo:
        assert allow(1.0)
        return UpdateInfo(1.0, 1.0)


def samples(returns: Tensor, old: Tensor, valid: Sequence[bool]) -> Batch:
    batch = random_samples(LENGTHS)
    lengths = torch.tensor([after for _, after in LENGTHS])
    return batch.with_columns(
        response_lengths=lengths,
        reward_valid=torch.tensor(valid),
        values=Jagged(old, lengths, "response_tokens"),
        returns=Jagged(returns, lengths, "response_tokens"),
    )


def context_of(engine: Table, **batch: int) -> StageContext:
    workflow = resolve_workflow("ppo")
    sections = {"algorithm": {**workflow.algorithm, "critic": {"value_clip": 0.5}}, "batch": batch}
    recipe = make_recipe(**sections)
    plan = make_plan(recipe, workflow, Cluster(1))
    return StageContext(
        recipe=recipe,
        node=plan["critic"],
        step=1,
        process_group=GROUP,
        metrics=Metrics(),
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=cast("ValueEngine", engine),
        grade=cast("Grader", None),
    )


def test_a_failed_reward_carries_no_gradient_whatever_its_columns_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    now, old, returns = torch.randn(3, 9, generator=generator)
    valid = [True, False, True, True]
    counted = torch.tensor([True] * 3 + [False] * 4 + [True] * 2)
    results = []
    for poison in (0.0, 1e30, float("nan")):
        engine = Table(now)
        context = context_of(engine)
        broken = samples(torch.where(counted, returns, poison), torch.where(counted, old, poison), valid)
        update_critic(broken, context)
        results.append((engine.numbers.grad, context.metrics.reduce(GROUP)))
    naive = now.double().requires_grad_()
    moved = old + (naive - old).clamp(-0.5, 0.5)
    errors = torch.maximum((naive - returns) ** 2, (moved - returns) ** 2)[counted]
    (0.5 * errors.mean()).backward()
    variance = 1 - ((returns - old)[counted].var() / returns[counted].var())
    for gradient, numbers in results:
        torch.testing.assert_close(gradient.double(), naive.grad, atol=1e-6, rtol=1e-5)
        assert numbers["critic/loss"] == pytest.approx(float(0.5 * errors.detach().mean()), rel=1e-5)
        assert numbers["critic/explained_variance"] == pytest.approx(float(variance), rel=1e-5)
        assert numbers["critic/value_mean"] == pytest.approx(float(old[counted].mean()), rel=1e-5)
        clipped = ((moved - returns) ** 2 > (naive - returns) ** 2)[counted].float().mean()
        assert numbers["critic/clip_fraction"] == pytest.approx(float(clipped))


def test_returns_that_are_all_equal_have_no_variance_to_explain() -> None:
    context = context_of(Table(torch.zeros(9)))
    update_critic(samples(torch.ones(9), torch.zeros(9), [True] * 4), context)
    assert "critic/explained_variance" not in context.metrics.reduce(GROUP)


def test_each_update_has_its_share_of_the_prompts() -> None:
    engine = Table(torch.zeros(9))
    update_critic(samples(torch.ones(9), torch.zeros(9), [True] * 4), context_of(engine, updates_per_step=2))
    assert engine.updates == [[0, 1], [2, 3]]


def test_each_epoch_sees_all_prompts_again() -> None:
    engine, settings = Table(torch.zeros(9)), {"updates_per_step": 4, "epochs_per_step": 2}
    update_critic(samples(torch.ones(9), torch.zeros(9), [True] * 4), context_of(engine, **settings))
    assert engine.updates == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_values_are_a_column_of_response_tokens() -> None:
    batch = samples(torch.ones(9), torch.zeros(9), [True] * 4)
    column = values(batch, context_of(Table(torch.arange(9.0)))).jagged("values")
    assert column.axis == "response_tokens"
    assert column.values.tolist() == list(range(9))
