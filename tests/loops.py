"""Runs of two loops, one that generates and one that trains, and what their ranks see."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NoReturn
from unittest.mock import patch

import torch
from rich.console import Console
from tests.delays import delays
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_additions, write_recipe
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.observability.console import Display
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.placement.replanning import ReplanChoice
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.asynchronous.in_flight import Advance, ResponsesInFlight
from leaderless.worker.build.parts import Parts
from leaderless.worker.build.process import open_worker
from leaderless.worker.chain import Chain
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.replan.replanner import Replanner
from leaderless.worker.worker import Worker

NUM_STEPS, UPDATES, PROMPTS, RESPONSES = 6, 2, 4, 4
SETTINGS = {
    "steps": NUM_STEPS,
    "batch.prompts_per_step": PROMPTS,
    "batch.responses_per_prompt": RESPONSES,
    "batch.updates_per_step": UPDATES,
    "optimizer.learning_rate": 1e-2,
    "run.trace_steps": NUM_STEPS,
    "evaluation": {"every_steps": 2, "max_prompts": 3},
}
SLOW = "skewed"
"""Part of the names of runs in which the engine of rank 1 is slow, so that ranks are not at the same iteration."""
Stop = tuple[Literal["rollout", "policy"], int]
"""Loop, and the iteration at whose beginning the loop's last rank gets a signal."""

Kill = tuple[Literal["before", "during", "after"], int]
"""Phase of a switch in which a rank is killed, or two steps later, and the rank."""


@dataclass
class Seen:
    """What one rank saw of a run, or all ranks together.

    Attributes:
        trained: Tokens and policy version of each sample that the update received, by training iteration.
        weights: Trained weights at the end.
        done: Iterations of the rank's loop, and training iterations whose weights it has.
    """

    trained: dict[int, dict[int, tuple[list[int], int]]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    done: tuple[int, int] = (0, 0)


def train(
    recipe_file: str,
    overrides: Sequence[str],
    stop: Stop | None = None,
    switches: Mapping[int, str] = MappingProxyType({}),
    kill: Kill | None = None,
    delays_of: int | None = None,
) -> Seen:
    """Be one worker of a run, or of the rest of it; one rank may get a signal, or be killed while the plan changes.

    With a seed (`delays_of`), all that ranks exchange is delayed at random.
    """
    recipe = load_recipe(recipe_file, overrides).recipe
    place, seen = RankInfo.from_environment(), Seen()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    with ExitStack() as stack:
        if delays_of is not None:
            stack.enter_context(delays(delays_of))
        worker = stack.enter_context(open_worker(recipe, plan, place, Display(Console(), is_shown=False)))
        phase = kill[0] if kill is not None and kill[1] == place.rank else ""
        stack.enter_context(patch.object(Replanner, "look", switching(worker, switches, phase)))
        if SLOW in recipe.name and place.rank == 1:
            stack.enter_context(patch.object(ResponsesInFlight, "step", slow_step))
        watch(worker, seen, stop)
        worker.run()
        seen.done = worker.progress.step, worker.progress.trained
        trained = worker.parts.roles.trained().get("policy")
        if trained is not None:
            seen.weights = {name: weight.clone() for name, weight in trained.full_weights()}
    return seen


def watch(worker: Worker, seen: Seen, stop: Stop | None) -> None:
    """Note what the update receives under this plan and later ones, and send a signal to this rank."""
    stages, walk, follow = worker.chain.stages, worker.chain.walk, partial(Worker._follow, worker)
    loop = worker.parts.plan.loop_of(worker.parts.transport.rank)

    def update(batch: Batch, context: StageContext) -> Batch:
        versions = [max(row, default=0) for row in batch.jagged("policy_versions").to_lists()]
        samples = zip(batch.jagged("tokens").to_lists(), versions, strict=True)
        seen.trained[context.step] = dict(zip(batch.ids.tolist(), samples, strict=True))
        return stages["policy"](batch, context)

    def watched_walk(*prompts: Batch) -> None:
        if stop == (loop.name, worker.progress.step) and worker.parts.transport.rank == loop.ranks[-1]:
            signal.raise_signal(signal.SIGTERM)
        walk(*prompts)

    def watched_follow(parts: Parts, chain: Chain) -> None:
        follow(parts, chain)
        for model in parts.roles._models.values():
            serving = getattr(model, "serving", None)
            assert not getattr(getattr(serving, "engine", None), "_owners", ()), "nothing is under way any more"
        watch(worker, seen, stop)

    watched = {"policy": update, "reward": parity}
    worker.chain.stages = {**stages, **{name: stage for name, stage in watched.items() if name in stages}}
    worker.chain.walk = watched_walk  # type: ignore[method-assign]
    worker._follow = watched_follow  # type: ignore[method-assign]


def switching(worker: Worker, switches: Mapping[int, str], phase: str) -> Callable[[Replanner, int], Plan | None]:
    """Stands in for `Replanner.look`: takes on the layout of a step, and lets this rank die in a phase of that.

    A layout that is none of the recipe's is one that the planner has to find.
    """
    look = Replanner.look

    def look_and_switch(self: Replanner, step: int) -> Plan | None:
        name = switches.get(step, self._current)
        if phase == "after" and step - 2 in switches:
            die()  # there is a checkpoint under the other plan
        if name == self._current:
            return None
        if phase == "before":
            die()
        elif phase == "during":
            worker.parts.roles.sync_all = die  # type: ignore[method-assign]
        if name not in self.plans:
            with patch("leaderless.worker.replan.replanner.choose", partial(chosen, self, name)):
                return look(self, step)
        self.choice = ReplanChoice(name, 2.0, 1.0, is_worth_it=True)
        return self.plans[name]

    return look_and_switch


def chosen(
    replanner: Replanner, name: str, expected: Mapping[str, float], current: str, switch_s: float, *_: object
) -> ReplanChoice:
    """Stands in for `choose`: a layout, with the seconds that are expected of it."""
    assert switch_s > replanner._switch_s, "what is generated again counts"
    return ReplanChoice(name, expected[current], expected[name], is_worth_it=True)


def slow_step(field: ResponsesInFlight) -> list[Advance]:
    time.sleep(0.15)
    return STEP(field)


STEP = ResponsesInFlight.step


def parity(batch: Batch, context: StageContext) -> Batch:
    """Stands in for a reward."""
    rewards = torch.tensor([float(sum(tokens) % 2) for tokens in batch.jagged("tokens").to_lists()])
    is_valid = torch.ones(len(batch), dtype=torch.bool)
    return batch.with_columns(rewards=rewards, reward_valid=is_valid, reward_details=tuple({} for _ in rewards))


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


@dataclass(frozen=True)
class Runs:
    """Trains in a folder."""

    ranks: RankPool
    folder: Path

    def __call__(
        self,
        generating: int,
        training: int,
        channel: int | Mapping[str, object],
        name: str,
        stop: Stop | None = None,
        steps: int = NUM_STEPS,
        switches: Mapping[int, str] | None = None,
        kill: Kill | None = None,
        *,
        delays_of: int | None = None,
        **more: object,
    ) -> Seen:
        seen = self.ranks.run(
            generating + training,
            train,
            str(self.recipe(generating, training, channel, **more)),
            [f"name={name}", f"steps={steps}"],
            stop,
            switches or {},
            kill,
            delays_of,
            init_group=False,
            timeout_s=120.0,
        )
        whole = Seen(done=seen[-1].done)
        for one in seen:
            whole.weights |= one.weights
            for step, samples in one.trained.items():
                whole.trained.setdefault(step, {}).update(samples)
        return whole

    def recipe(self, generating: int, training: int, channel: int | Mapping[str, object], **more: object) -> Path:
        """Write the recipe of a run, and its data."""
        data = {"path": str(self.folder / "train.jsonl"), "prompt": "question", "answer": "answer", "template": "plain"}
        channels = {"rollout": {"capacity": channel} if isinstance(channel, int) else dict(channel)}
        changes = {"layout": beside(generating, training), "channels": channels, "data.evaluation": data, **more}
        write_additions(self.folder / "train.jsonl", 64)
        return write_recipe(self.folder, tiny_model(num_layers=1), {**SETTINGS, **changes})

    def directory(self, name: str) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / name)


def beside(generating: int, training: int) -> dict[str, dict[str, str]]:
    """The section `layout` with ranks that generate before those that train."""
    return {
        node: {"ranks": f"0-{generating - 1}" if node == "rollout" else f"{generating}-{generating + training - 1}"}
        for node in ("rollout", "reward", "policy")
    }


def numbers(directory: RunDirectory) -> list[dict[str, float]]:
    """The numbers of each step that do not depend on time."""
    unsteady = ("time", "seconds/", "sent/", "throughput/", "memory/", "data/wait", "rollout/tokens_per_s")
    return [{k: v for k, v in row.items() if not k.startswith(unsteady)} for row in directory.read_metrics()]


def assert_same(one: Seen, other: Seen) -> None:
    assert one.trained == other.trained
    assert one.weights.keys() == other.weights.keys() != set()
    assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


def iterations(directory: RunDirectory, file: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory.journal / file).read_text().splitlines()]
