"""The weight of the KL penalty: when it adapts, and when it stays constant."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import cast

import pytest
import torch
from tests.tiny import random_samples
from tests.unit.recipes import make_recipe

from leaderless.algorithms import adapted_coefficient
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.stages.advantage import advantage
from leaderless.stages.context import Grader, StageContext
from leaderless.stages.mini_batches import KL_STATE

LENGTHS = [(2, 3), (1, 4), (3, 0), (2, 2)]
GROUP = ProcessGroup((0,), 0)
DIVERGENCE = 0.5
"""Divergence of each token, five times the target."""
KL = {"coefficient": 0.2, "target": 0.1, "horizon": 10.0}


def samples() -> Batch:
    lengths = torch.tensor([after for _, after in LENGTHS])
    zeros = torch.zeros(int(lengths.sum()))
    columns = {"old_log_probs": zeros, "ref_log_probs": zeros - DIVERGENCE, "values": zeros}
    return random_samples(LENGTHS).with_columns(
        response_lengths=lengths,
        reward_valid=torch.ones(len(LENGTHS), dtype=torch.bool),
        rewards=torch.arange(len(LENGTHS)).float(),
        **{name: Jagged(values, lengths, "response_tokens") for name, values in columns.items()},
    )


def advantage_in(step: int, state: MutableMapping[str, float], warmup_steps: int) -> dict[str, float]:
    """The metrics of PPO's advantage in a step, with a penalty in the reward."""
    workflow = resolve_workflow("ppo")
    kl = {**workflow.algorithm["kl"], **KL}  # type: ignore[dict-item]
    algorithm = {**workflow.algorithm, "kl": kl, "critic": {"warmup_steps": warmup_steps}}
    recipe = make_recipe(algorithm=algorithm, steps=5)
    context = StageContext(
        recipe=recipe,
        node=make_plan(recipe, workflow, Cluster(1))["advantage"],
        step=step,
        process_group=GROUP,
        metrics=Metrics(),
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=None,
        grade=cast("Grader", None),
        state=state,
    )
    advantage(samples(), context)
    return context.metrics.reduce(GROUP)


def test_the_weight_of_the_penalty_holds_still_until_the_policy_is_trained() -> None:
    state: dict[str, float] = {}
    logged = [advantage_in(step, state, warmup_steps=2)["policy/kl_coefficient"] for step in (1, 2, 3, 4)]
    grown = adapted_coefficient(0.2, DIVERGENCE, target=0.1, horizon=10.0, num_episodes=len(LENGTHS))
    assert grown > 0.2
    assert logged == pytest.approx([0.2, 0.2, 0.2, grown])


def test_the_weight_of_the_penalty_adapts_from_the_first_step_without_a_warm_up() -> None:
    state: dict[str, float] = {}
    logged = [advantage_in(step, state, warmup_steps=0)["policy/kl_coefficient"] for step in (1, 2)]
    assert logged[1] > logged[0]
    assert state[KL_STATE] > logged[1]
