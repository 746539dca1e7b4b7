"""Two policies that are trained in one workflow, each on its own samples of the same prompts."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.delays import delays
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps
from tests.tiny import tiny_model, write_recipe
from torch import Tensor

from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan, rollout_engine
from leaderless.planner.workflow import Workflow, load_recipe, resolve_workflow, write_workflow
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.make_engine import RolloutSetup
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo

NUM_STEPS = 2
CLOCKS = ("time", "seconds/", "sent/", "throughput", "rollout/tokens_per_s", "memory", "data/", "balance/")
SETTINGS: Mapping[str, object] = {
    "models": {"first": tiny_model(num_layers=1), "second": tiny_model("qwen3", num_layers=1)},
    "batch.updates_per_step": 2,
    "reward": {"tests.end_to_end.own_reward:own_reward": 1.0},
    "roles": {
        "second": {
            "optimizer": {"learning_rate": 3e-3, "beta2": 0.9},
            "algorithm": {"policy_loss": {"type": "reinforce"}},
            "rollout": {"temperature": 0.7, "max_response_tokens": 4},
        }
    },
}
PLACES: Mapping[str, tuple[int, dict[str, str]]] = {
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "samples on 0, updates on 1": (2, {"first_rollout": "0", "second_rollout": "0", "first": "1", "second": "1"}),
    "a policy on 0-1 and one on 2-3": (4, {"first": "0-1", "second": "2-3"}),
}
"""Number of ranks, and those of some nodes."""


def sampling() -> Workflow:
    workflow = Workflow("two")
    for role in ("first", "second"):
        workflow = workflow.node(f"{role}_rollout", run="rollout", role=role)
        workflow = workflow.node(f"{role}_old", run="log_probs", role=role, after=f"{role}_rollout")
    return workflow


def joined() -> Workflow:
    """The responses of both policies to a prompt form one group."""
    workflow = sampling().node("reward", run="reward", after=["first_rollout", "second_rollout"])
    workflow = workflow.node("advantage", run="advantage", after="reward").node("kept", run="record", after="advantage")
    for role in ("first", "second"):
        workflow = workflow.node(role, run="update", role=role, after="advantage", where={"agent": role})
    return workflow


def apart() -> Workflow:
    """Each policy is compared with itself; samples are graded together, and are together again in the report."""
    workflow = sampling().node("reward", run="reward", after=["first_rollout", "second_rollout"])
    for role in ("first", "second"):
        workflow = workflow.node(f"{role}_gain", run="advantage", after="reward", where={"agent": [role]})
        workflow = workflow.node(role, run="update", role=role, after=f"{role}_gain")
    return workflow.node("kept", run="record", after=["first_gain", "second_gain"])


def alone() -> Workflow:
    workflow = Workflow("alone").node("first_rollout", run="rollout", role="first")
    workflow = workflow.node("first_old", run="log_probs", role="first", after="first_rollout")
    workflow = workflow.node("reward", run="reward", after="first_rollout")
    workflow = workflow.node("gain", run="advantage", after="reward")
    return workflow.node("first", run="update", role="first", after=["gain", "first_old"])


def next_to_another() -> Workflow:
    """The first policy is trained, and the second one only samples."""
    workflow = Workflow("next").node("first_rollout", run="rollout", role="first")
    workflow = workflow.node("second_rollout", run="rollout", role="second")
    workflow = workflow.node("reward", run="reward", after=["first_rollout", "second_rollout"])
    workflow = workflow.node("gain", run="advantage", after="reward", where={"agent": "first"})
    workflow = workflow.node("first_old", run="log_probs", role="first", after="gain")
    return workflow.node("first", run="update", role="first", after=["gain", "first_old"])


WORKFLOWS = {"joined": joined, "apart": apart, "alone": alone, "next to another": next_to_another}
WORKFLOWS |= {"two back ends": joined, "no engine": joined}
CHANGES: Mapping[str, dict[str, object]] = {
    "alone": {"models": {"first": tiny_model(num_layers=1)}, "roles": {}},
    "two back ends": {
        "roles": {
            "second": {
                **SETTINGS["roles"]["second"],  # type: ignore[index]
                "training": {"backend": "tests.contracts.replicated:make_engine"},
            }
        }
    },
    "next to another": {
        "roles": {"second": {"rollout": {"temperature": 0.7, "engine": "tests.contracts.plain_engine:make"}}}
    },
    "no engine": {"roles": {"second": {"rollout": {"engine": "tests.end_to_end.test_two_policies:no_engine"}}}},
}


@rollout_engine()
def no_engine(setup: RolloutSetup) -> RolloutEngine:
    raise RuntimeError(f"asked for an engine for '{setup.role}'")


Walk = Callable[[str, str], list[list[Step]]]


@pytest.fixture(scope="module")
def walk(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """What the ranks of a place see of each step of a workflow; each case is run once."""

    @functools.cache
    def walk(workflow: str, place: str) -> list[list[Step]]:
        folder = tmp_path_factory.mktemp("walk")
        (folder / "two.yaml").write_text(write_workflow(WORKFLOWS[workflow]()))
        world_size, nodes = PLACES.get(place, (1, {}))
        layout = {name: {"ranks": own} for name, own in nodes.items()}
        own = {"workflow": str(folder / "two.yaml"), "layout": layout}
        recipe = write_recipe(folder, tiny_model(num_layers=1), {**SETTINGS, **CHANGES.get(workflow, {}), **own})
        return ranks.run(world_size, walk_steps, str(recipe), "walk", NUM_STEPS, init_group=False)

    return walk


def test_each_role_has_the_engine_that_its_settings_name(walk: Walk) -> None:
    with pytest.raises(Exception, match="asked for an engine for 'second'"):
        walk("no engine", "1 rank")


@pytest.mark.parametrize("workflow", ["joined", "apart"])
def test_both_policies_are_trained_and_their_metrics_name_them(walk: Walk, workflow: str) -> None:
    first, second = (merged(walk(workflow, "1 rank"), step) for step in range(NUM_STEPS))
    for role in ("first", "second"):
        moved = [name for name, weights in first["weights"].items() if not second["weights"][name].equal(weights)]
        assert any(name.startswith(f"{role}.") for name in moved), role
        names = {f"{role}/loss", f"{role}/grad_norm", f"rollout/staleness/{role}", f"mismatch/kl/{role}"}
        names |= {f"rollout/response_tokens/{role}", f"rollout/tokens_per_s/{role}"}
        assert names <= second["numbers"].keys(), sorted(second["numbers"])
    assert second["numbers"]["second/learning_rate"] == 3e-3
    assert second["numbers"]["rollout/response_tokens/second"] <= 4
    assert "reward/mean" in second["numbers"]
    assert ("group/no_signal" in second["numbers"]) == (workflow == "joined")
    assert ("group/no_signal/first" in second["numbers"]) == (workflow == "apart")


@pytest.mark.parametrize(
    ("workflow", "place"),
    [
        ("joined", "2 ranks"),
        ("joined", "a policy on 0-1 and one on 2-3"),
        ("apart", "samples on 0, updates on 1"),
        pytest.param("apart", "2 ranks", marks=pytest.mark.thorough),
        pytest.param("joined", "4 ranks", marks=pytest.mark.thorough),
        pytest.param("apart", "a policy on 0-1 and one on 2-3", marks=pytest.mark.thorough),
        pytest.param("joined", "samples on 0, updates on 1", marks=pytest.mark.thorough),
    ],
)
def test_two_policies_learn_the_same_on_any_ranks(walk: Walk, workflow: str, place: str) -> None:
    single, several = walk(workflow, "1 rank"), walk(workflow, place)
    for step in range(NUM_STEPS):
        expected, result = merged(single, step), merged(several, step)
        for name, value in expected["numbers"].items():
            if not name.startswith(CLOCKS):
                other = result["numbers"][name]
                assert other == pytest.approx(value, rel=1e-3, abs=1e-4), f"{name}, step {step + 1}"
        assert expected["weights"].keys() == result["weights"].keys()
        for name, weights in expected["weights"].items():
            difference = (result["weights"][name] - weights).norm() / weights.norm().clamp(min=1e-3)
            assert float(difference) < 1e-4, f"{name}, step {step + 1}"


def test_a_policy_learns_the_same_next_to_one_that_is_not_trained(walk: Walk) -> None:
    for step in range(NUM_STEPS):
        expected, result = merged(walk("alone", "1 rank"), step), merged(walk("next to another", "1 rank"), step)
        assert expected["weights"].keys() == result["weights"].keys()
        assert all(result["weights"][name].equal(weights) for name, weights in expected["weights"].items())
        assert result["numbers"]["first/loss"] == expected["numbers"]["first/loss"]
        assert result["numbers"]["rollout/truncated/first"] == expected["numbers"]["rollout/truncated"]


def evaluated(recipe_file: str, overrides: list[str]) -> tuple[dict[str, float], bool]:
    """What a rank measures on held-out prompts, and whether it does so with the second policy."""
    loaded = load_recipe(recipe_file, ["name=evaluated", *overrides])
    place = RankInfo.from_environment()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    with open_worker(loaded.recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        evaluator = worker.parts.evaluator
        if evaluator is None:
            return worker.evaluate(), False
        assert evaluator.recipe.rollout.max_response_tokens == 4
        return worker.evaluate(), evaluator.model is worker.parts.roles.of("second", evaluator.layout)


def recorded(recipe_file: str) -> list[dict[str, object]]:
    """The samples of a step that are kept for people."""
    walk_steps(recipe_file, "recorded", 1)
    files = sorted((Path(recipe_file).parent / "runs/recorded/samples").glob("step-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("workflow", ["joined", "next to another"])
def test_recorded_samples_name_the_role_that_sampled_them(ranks: RankPool, tmp_path: Path, workflow: str) -> None:
    nodes = WORKFLOWS[workflow]()
    if workflow == "next to another":
        nodes = nodes.node("kept", run="record", after="gain")
    (tmp_path / "two.yaml").write_text(write_workflow(nodes))
    own = {"workflow": str(tmp_path / "two.yaml"), "run.recorded_prompts": 2}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {**SETTINGS, **CHANGES.get(workflow, {}), **own})
    (samples,) = ranks.run(1, recorded, str(recipe), init_group=False)
    by_role = Counter(sample["role"] for sample in samples)
    assert by_role == ({"first": 8, "second": 8} if workflow == "joined" else {"first": 8})
    lengths = {
        sample["role"]: max(one["tokens"]["total"] for one in samples if one["role"] == sample["role"])
        for sample in samples
    }
    assert lengths["first"] > 4 >= lengths.get("second", 4)


def test_the_policy_that_the_recipe_names_is_evaluated(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(write_workflow(joined()))
    layout = {"first": {"ranks": "0"}, "second": {"ranks": "1"}, "second_rollout": {"ranks": "1"}}
    held_out = {"path": str(tmp_path / "train.jsonl"), "prompt": "question", "answer": "answer", "template": "plain"}
    own = {"workflow": str(tmp_path / "two.yaml"), "layout": layout, "data.evaluation": held_out}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {**SETTINGS, **own})
    overrides = ["evaluation.every_steps=1", "evaluation.role=second"]
    first, second = ranks.run(2, evaluated, str(recipe), overrides, init_group=False)
    assert "evaluation/mean@1" in first[0]
    assert (first[1], second[1]) == (False, True)


def test_two_policies_may_have_different_back_ends(walk: Walk) -> None:
    single, several = walk("joined", "1 rank"), walk("two back ends", "2 ranks")
    for step in range(NUM_STEPS):
        expected, result = merged(single, step), merged(several, step)
        for name in ("first/loss", "second/loss", "first/grad_norm", "second/grad_norm", "reward/mean"):
            assert result["numbers"][name] == pytest.approx(expected["numbers"][name], rel=1e-3, abs=1e-4), name
        for name, weights in expected["weights"].items():
            difference = (result["weights"][name] - weights).norm() / weights.norm().clamp(min=1e-3)
            assert float(difference) < 1e-4, f"{name}, step {step + 1}"


def train_ahead(recipe_file: str, name: str, seed: int | None) -> dict[str, Tensor]:
    """The weights of both policies that this rank trains; with a seed, all that ranks exchange is delayed at random."""
    recipe = load_recipe(recipe_file, [f"name={name}"]).recipe
    place = RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    assert [one.name for one in plan.channels if one.sync] == ["first=>first_rollout", "second=>second_rollout"]
    disturbing = nullcontext() if seed is None else delays(seed)
    with disturbing, open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        worker.run()
        trained = worker.parts.roles.trained().items()
        return {f"{role}/{name}": one.clone() for role, engine in trained for name, one in engine.full_weights()}


def test_two_policies_that_generate_ahead_get_the_same_weights_in_any_order(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(write_workflow(joined()))
    nodes = [node.name for node in joined().nodes]
    layout = {name: {"ranks": "0" if name.endswith("_rollout") else "1"} for name in nodes}
    ahead = {"layout": layout, "channels": {"first_rollout": {"capacity": 1}}, "steps": 3}
    own = {"workflow": str(tmp_path / "two.yaml"), **ahead}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {**SETTINGS, **own})
    undisturbed, delayed = (
        ranks.run(2, train_ahead, str(recipe), f"ahead-{seed}", seed, init_group=False, timeout_s=60.0)[1]
        for seed in (None, 0)
    )
    assert {name.partition("/")[0] for name in undisturbed} == {"first", "second"}
    assert undisturbed.keys() == delayed.keys()
    assert all(torch.equal(weight, delayed[name]) for name, weight in undisturbed.items())
