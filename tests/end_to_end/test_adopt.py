"""A run goes on under another plan as if it had been stopped and resumed with it, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankError, RankPool
from tests.tiny import tiny_model, write_recipe
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.config import RecipeError
from leaderless.config.layout import LayoutConfig
from leaderless.data.batch import Batch
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.placement.replanning import ReplanChoice, with_layout
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.replan.replanner import NUM_LOOKED_AT

SWITCH, NUM_STEPS = 2, 3
MODEL = tiny_model(num_layers=1)
UNSTEADY = (
    "time",
    "seconds/",
    "sent/",
    "throughput",
    "memory/",
    "balance/",
    "data/wait",
    "transfer/",
    "rollout/tokens_per_s",
)
"""Prefixes of the names of numbers that differ from run to run, or from layout to layout."""
Ranks = Mapping[str, str]
"""Ranks of nodes."""
TOGETHER: Ranks = {}
APART: Ranks = {"rollout": "0", "policy": "1"}
SETTINGS: Mapping[str, object] = {
    "batch.updates_per_step": 2,
    "algorithm.kl.coefficient": 0.1,
    "reward": {"format": {"pattern": r".*\d.*"}},
    "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
    "evaluation.every_steps": 1,
    "evaluation.max_prompts": 4,
}
PPO = {"workflow": "ppo", "models.critic": "critic", "algorithm.critic": {"warmup_steps": 1, "value_clip": 0.02}}
ADAPTERS = {"models.policy": "adapters"}
DAPO = {"workflow": "dapo", "batch.prompts_per_step": 6, "evaluation.every_steps": 0}


@dataclass
class Seen:
    """What one rank saw of a run.

    Attributes:
        numbers: Metrics of each step, on the first rank.
        samples: Tokens of each sample of a step that this rank trained on.
        state: Weights and optimizers that this rank holds at the end.
        kept: Engines that the last switch did not touch, by role.
    """

    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)


def layout_of(ranks: Ranks) -> dict[str, LayoutConfig]:
    return {node: LayoutConfig(ranks=text) for node, text in ranks.items()}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    recipe_file: str, overrides: Sequence[str], steps: int, switches: Mapping[int, Ranks], is_killed: bool = False
) -> Seen:
    """Be one worker of a run, or of the rest of one, that goes on under other plans after some steps.

    The second rank may be killed during a switch, when weights have been moved.
    """
    loaded = load_recipe(recipe_file, overrides)
    place, seen = RankInfo.from_environment(), Seen()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    recipe = loaded.recipe.model_copy(update={"steps": steps})
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        run_step = worker.run_step

        def step() -> dict[str, float]:
            if worker.progress.step in switches:
                before = dict(worker.parts.roles.engines)
                layout = layout_of(switches[worker.progress.step])
                if is_killed and place.rank == 1:
                    worker.parts.roles.sync_all = die  # type: ignore[method-assign]
                worker.adopt(with_layout(loaded.recipe, layout, worker.parts.plan))
                roles = worker.parts.roles.engines.items()
                seen.kept = {role for (role, ranks), engine in roles if before.get((role, ranks)) is engine}
            samples = seen.samples[worker.progress.step + 1] = {}
            update = worker.chain.stages.get("policy")

            def watched(batch: Batch, context: StageContext) -> Batch:
                assert update is not None
                samples.update(zip(batch.ids.tolist(), batch.jagged("tokens").to_lists(), strict=True))
                return update(batch, context)

            stages = worker.chain.stages
            worker.chain.stages = {**stages, "policy": watched} if update else stages
            numbers = run_step()
            worker.chain.stages = stages
            steady = {name: value for name, value in numbers.items() if not name.startswith(UNSTEADY)}
            seen.numbers[worker.progress.step] = steady if place.rank == 0 else {}
            return numbers

        worker.run_step = step  # type: ignore[method-assign]
        worker.run()
        for role, engine in worker.parts.roles.trained().items():
            for name, value in engine.state().items():
                local = value.to_local() if isinstance(value, DTensor) else value
                seen.state[f"{role}.{name}"] = local.clone()
            seen.state[f"{role}.version"] = torch.tensor(engine.policy_version)
    return seen


def train_and_choose(name: str, *arguments: object) -> Seen:
    """Be one worker of a run that takes on a layout, whatever seconds it has seen."""

    def chosen(expected: Mapping[str, float], current: str, *_: object) -> ReplanChoice:
        assert expected[name] > 0
        return ReplanChoice(name, 2.0, 1.0, is_worth_it=current != name)

    with patch("leaderless.worker.replan.replanner.choose", chosen):
        return train(*arguments)  # type: ignore[arg-type]


class Runs:
    """Trains in one folder."""

    def __init__(
        self,
        ranks: RankPool,
        folder: Path,
        changes: Mapping[str, object] = SETTINGS,
        chosen: str = "",
    ) -> None:
        """Train so; with `chosen`, the run itself takes on the layout of this name."""
        self._ranks, self._folder, self._chosen = ranks, folder, chosen
        models = {"critic": MODEL, "adapters": {"path": MODEL, "lora": {"rank": 3}}}
        changes = {key: models.get(str(value), value) for key, value in changes.items()}
        self._changes = {"steps": NUM_STEPS, **changes}

    def __call__(
        self,
        name: str,
        layout: Ranks,
        steps: int = NUM_STEPS,
        switches: Mapping[int, Ranks] | None = None,
        size: int = 2,
        is_killed: bool = False,
    ) -> list[Seen]:
        layouts = {node: {"ranks": text} for node, text in layout.items()}
        recipe = write_recipe(self._folder, MODEL, {**self._changes, "layout": layouts})
        evaluation = [f"data.evaluation.{key}={value}" for key, value in self._held_out().items()]
        overrides = [f"name={name}", *evaluation]
        arguments = str(recipe), overrides, steps, switches or {}, is_killed
        if self._chosen:
            return self._ranks.run(size, train_and_choose, self._chosen, *arguments, init_group=False)
        return self._ranks.run(size, train, *arguments, init_group=False)

    def _held_out(self) -> Mapping[str, str]:
        path = self._folder / "train.jsonl"
        return {"path": str(path), "prompt": "question", "answer": "answer", "template": "plain"}


def samples_of(runs: Sequence[Seen], step: int) -> dict[int, list[int]]:
    return {row: tokens for seen in runs for row, tokens in seen.samples.get(step, {}).items()}


def assert_same(one: Sequence[Seen], other: Sequence[Seen], steps: range) -> None:
    """Compare two runs bit for bit, rank by rank."""
    for step in steps:
        assert samples_of(one, step) == samples_of(other, step), f"step {step}"
        assert one[0].numbers[step] == other[0].numbers[step], f"step {step}"
    for rank, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.state.keys() == theirs.state.keys(), f"rank {rank}"
        for name, value in mine.state.items():
            assert torch.equal(value, theirs.state[name]), f"rank {rank}: {name}"


CASES: Mapping[str, tuple[Mapping[str, object], Ranks, Ranks]] = {
    "together, then apart": ({}, TOGETHER, APART),
    "apart, then together": ({}, APART, TOGETHER),
    "the reference moves": ({}, APART, {**APART, "reference": "0-1"}),
    "ppo, its critic moves": (PPO, {"critic": "0", "policy": "1"}, {"critic": "1", "policy": "0-1"}),
    "adapters, then without their reference": (ADAPTERS, TOGETHER, {"rollout": "0", "reference": "0", "policy": "1"}),
    "adapters, then with their reference": (ADAPTERS, APART, TOGETHER),
    "surplus goes to fewer ranks": (DAPO, TOGETHER, APART),
    "surplus goes to more ranks": (DAPO, APART, TOGETHER),
}


IN_SHORT = (
    "the reference moves",
    "ppo, its critic moves",
    "adapters, then with their reference",
    "surplus goes to fewer ranks",
)
"""Cases of the short form: nodes move apart and together, with a critic, with adapters, with surplus."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in IN_SHORT else pytest.mark.thorough) for case in CASES]
)
def test_a_switch_is_like_stopping_and_resuming_with_the_other_layout(
    ranks: RankPool, tmp_path: Path, case: str
) -> None:
    changes, before, after = CASES[case]
    runs = Runs(ranks, tmp_path, {**SETTINGS, **changes})
    switched = runs("switched", before, switches={SWITCH: after})
    runs("resumed", before, SWITCH)
    resumed = runs("resumed", after)
    assert_same(switched, resumed, range(SWITCH + 1, NUM_STEPS + 1))
    if case == "the reference moves":
        assert "policy" in switched[1].kept, "models that stay are not built again"
    if case.startswith("surplus"):
        undisturbed = runs("undisturbed", before)
        for step in range(1, NUM_STEPS + 1):
            assert samples_of(switched, step) == samples_of(undisturbed, step), f"step {step}"


def beside(generating: str, training: str) -> Ranks:
    return {"rollout": generating, "reward": training, "reference": training, "policy": training}


@pytest.mark.parametrize(
    ("before", "after", "lag", "name"),
    [
        # The planner finds the first one; in the second, what has generated trains, with rows in flight.
        (
            beside("0", "1-2"),
            beside("0-1", "2"),
            1,
            "rollout on 0-1; reward, old, reference, advantage, samples, policy on 2",
        ),
        (beside("0-1", "2"), beside("2", "0-1"), 2, "named"),
    ],
)
def test_a_switch_takes_rows_in_flight_along(
    ranks: RankPool, tmp_path: Path, before: Ranks, after: Ranks, lag: int, name: str
) -> None:
    switch = NUM_LOOKED_AT + 1
    steps = switch + lag + 1
    named = {name: {node: {"ranks": at} for node, at in after.items()}} if name == "named" else "auto"
    schedule = {"replan_every_steps": switch, "layouts": named}
    channels = {"rollout": {"capacity": lag}}
    changes = {**SETTINGS, "channels": channels, "checkpoint.every_steps": 0, "evaluation.every_steps": 0}
    resuming = Runs(ranks, tmp_path, changes | {"steps": steps})
    resuming("resumed", before, switch + lag, size=3)
    resumed = resuming("resumed", after, steps, size=3)
    runs = Runs(ranks, tmp_path, changes | {"steps": steps, "schedule": schedule}, name)
    switched = runs("switched", before, steps, size=3)
    for step in range(switch + 1, steps + 1):
        assert samples_of(switched, step) == samples_of(resumed, step) != {}, f"step {step}"
    for step, numbers in resumed[0].numbers.items():
        own = {name: value for name, value in switched[0].numbers[step].items() if not name.startswith("schedule/")}
        assert own == numbers, f"step {step}"
    assert_same(switched, resumed, range(0))
    folder = tmp_path / "runs/switched"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), (
        "whoever writes it, the log has each step once"
    )
    assert [line["schedule/switches"] for line in lines] == [0.0] * switch + [1.0] * (steps - switch)
    for file in (folder / "journal").glob("*.jsonl"):
        iterations = [json.loads(line)["iteration"] for line in file.read_text().splitlines()]
        assert iterations == list(range(1, steps + 1)), file.name


def test_a_checkpoint_is_resumed_under_the_plan_that_it_was_made_under(ranks: RankPool, tmp_path: Path) -> None:
    changes = {"checkpoint.every_steps": 1, "checkpoint.keep": 5, "evaluation.every_steps": 0}
    runs = Runs(ranks, tmp_path, {**SETTINGS, **changes})
    switch = NUM_STEPS - 2
    whole = runs("whole", TOGETHER, switches={switch: APART})
    runs("parts", TOGETHER, switch + 1, switches={switch: APART})
    folder = tmp_path / "runs/parts"
    shutil.copytree(folder, tmp_path / "runs/older")
    shutil.copytree(folder, tmp_path / "runs/wider")
    shutil.copytree(folder, tmp_path / "runs/moved")
    last = range(NUM_STEPS, NUM_STEPS + 1)
    assert_same(runs("parts", TOGETHER), whole, last)
    # An older checkpoint is of the plan before.
    (tmp_path / f"runs/older/checkpoints/step-{switch + 1:06d}/state.json").write_text("damaged")
    assert_same(runs("older", TOGETHER), runs("undisturbed", TOGETHER), range(switch + 1, NUM_STEPS + 1))
    # With other ranks, or another layout in the recipe, the recipe's layout is in force.
    wider = runs("wider", TOGETHER, size=3)
    assert samples_of(wider, NUM_STEPS) == samples_of(whole, NUM_STEPS)
    assert all(seen.state for seen in wider)
    moved = runs("moved", {"rollout": "1", "policy": "0"})
    assert [bool(seen.state) for seen in moved] == [True, False]


def test_a_run_that_is_killed_during_a_switch_is_resumed_exactly(ranks: RankPool, tmp_path: Path) -> None:
    runs = Runs(ranks, tmp_path, {**SETTINGS, "checkpoint.every_steps": 1, "evaluation.every_steps": 0})
    switches = {SWITCH: APART}
    whole = runs("whole", TOGETHER, switches=switches)
    with pytest.raises(RankError):
        runs("killed", TOGETHER, switches=switches, is_killed=True)
    last = sorted(path.name for path in (tmp_path / "runs/killed/checkpoints").glob("step-*"))[-1]
    assert last <= f"step-{SWITCH:06d}"
    assert_same(runs("killed", TOGETHER, switches=switches), whole, range(NUM_STEPS, NUM_STEPS + 1))


def refusal(recipe_file: str, layout: Ranks, size: int) -> str:
    """The reason why a run does not go on under another plan."""
    loaded, place = load_recipe(recipe_file), RankInfo.from_environment()
    workflow = resolve_workflow(loaded.recipe.workflow)
    plan = make_plan(loaded.recipe, workflow, Cluster(place.world_size))
    recipe = loaded.recipe.model_copy(update={"channels": {}, "layout": layout_of(layout)})
    with open_worker(loaded.recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        try:
            worker.adopt(make_plan(recipe, workflow, Cluster(size)))
        except RecipeError as error:
            return str(error)
    return ""


def test_what_cannot_change_while_the_run_goes_on_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    apart = {node: {"ranks": text} for node, text in APART.items()}
    recipe = str(write_recipe(tmp_path, MODEL, {"layout": apart, "channels": {"rollout": {"capacity": 1}}}))
    for problem in ranks.run(2, refusal, recipe, TOGETHER, 2, init_group=False):
        assert "sends other columns through channels" in problem
        assert "stop the run" in problem
    recipe = str(write_recipe(tmp_path, MODEL))
    for problem in ranks.run(2, refusal, recipe, TOGETHER, 3, init_group=False):
        assert "a plan for 3 workers cannot replace one for 2" in problem
        assert "continue it with 3 workers" in problem
