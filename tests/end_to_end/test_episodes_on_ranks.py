"""Episodes are the same on any ranks and with any delays, and so is what is learned from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_recipe
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo

NUM_STEPS = 2


class Echo(Environment):
    """Says back the last character it was told, with a random one; some plays fail, and answers take a while."""

    def reset(self, task: Task, rng: Random) -> Observation:
        self.rng, self.turn, self.delays = rng, 0, Random()
        self.fails = rng.random() < 0.5
        return f"{task['question']}{rng.randrange(10)}"

    def act(self, text: str) -> Turn:
        time.sleep(0.01 * self.delays.random())
        self.turn += 1
        if self.fails and ord(text[:1] or "0") % 2:
            raise RuntimeError("unlucky")
        done = self.turn == 1 + ord(text[:1] or "0") % 3
        return Turn(f"{text[-1:]}{self.rng.randrange(10)}", reward=float(len(set(text))), done=done)


Sample = tuple[list[int], list[int], list[int], float, object]
"""Prompt, tokens, mask, reward and failure."""


@dataclass
class Seen:
    """What ranks saw of a run: the samples of each step, and the weights at the end."""

    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(recipe_file: str, overrides: list[str]) -> Seen:
    """Be one worker of a run."""
    recipe = load_recipe(recipe_file, overrides).recipe
    place, seen = RankInfo.from_environment(), Seen()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        stages = worker.chain.stages

        def rollout(batch: Batch, context: StageContext) -> Batch:
            made = stages["rollout"](batch, context)
            columns = [made.jagged(name).to_lists() for name in ("prompt_tokens", "tokens", "response_mask")]
            rest = made.dense("environment_rewards").tolist(), made.objects("environment_failed")
            rows = zip(*columns, *rest, strict=True)
            seen.samples |= {(context.step, number): row for number, row in zip(made.ids.tolist(), rows, strict=True)}
            return made

        if "rollout" in stages:
            worker.chain.stages = {**stages, "rollout": rollout}
        worker.run()
        trained = worker.parts.roles.trained().get("policy")
        if trained is not None:
            seen.weights = {name: weight.clone() for name, weight in trained.full_weights()}
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe."""
    folder = tmp_path_factory.mktemp("episodes")
    changes = {
        "environment": {"type": f"{__name__}:Echo", "max_turns": 4, "max_episode_tokens": 30},
        "reward": {},
        "algorithm.kl.coefficient": 0.1,
        "optimizer.learning_rate": 1e-2,
        "data.max_prompt_tokens": 8,
        "batch.micro_batch_tokens": 128,
    }
    write_recipe(folder, tiny_model(num_layers=1), changes)
    return folder


def run(ranks: RankPool, folder: Path, world_size: int, name: str, *overrides: str) -> Seen:
    arguments = [f"name={name}", f"steps={NUM_STEPS}", *overrides]
    all_seen = ranks.run(world_size, train, str(folder / "recipe.yaml"), arguments, init_group=False, timeout_s=120.0)
    whole = Seen()
    for one in all_seen:
        whole.samples |= one.samples
        whole.weights |= one.weights
    return whole


@pytest.fixture(scope="module")
def alone(ranks: RankPool, folder: Path) -> Seen:
    """The run on one rank."""
    return run(ranks, folder, 1, "alone")


def test_some_episodes_fail_and_some_have_several_turns(alone: Seen) -> None:
    failed = [failure is not None for *_, failure in alone.samples.values()]
    assert 0 < sum(failed) < len(failed) / 2
    turns = [
        sum(after > before for before, after in pairwise([0, *mask])) for _, _, mask, _, _ in alone.samples.values()
    ]
    assert max(turns) > 1


WAYS = {
    "two ranks": (2, []),
    "four ranks": (4, ["rollout.max_sequences=2", "environment.concurrency=3"]),
    "two pools": (2, ["layout={rollout: {ranks: 0}, reward: {ranks: 0}, policy: {ranks: 1}}"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_pools_and_delays_change_no_episode_and_no_gradient(
    ranks: RankPool, folder: Path, alone: Seen, way: str
) -> None:
    world_size, overrides = WAYS[way]
    seen = run(ranks, folder, world_size, way.replace(" ", "-"), *overrides)
    assert seen.samples == alone.samples
    for name, weight in alone.weights.items():
        torch.testing.assert_close(seen.weights[name], weight, rtol=0, atol=2e-5)
