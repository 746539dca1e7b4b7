"""Runs that learn from preferences: nothing depends on ranks, passes or an earlier start, and the reference is gone."""

from __future__ import annotations

import functools
import json
import math
import shutil
import weakref
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.training_trl import STORED, dpo_recipe
from examples.preferences.prepare import prepare
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import run
from tests.pictures import picture, vision_model
from tests.preferences import PAIR_DATA, SINGLE_DATA, engine_of, moved_model, write_rows
from tests.tiny import tiny_model, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.config import RecipeError
from leaderless.data.dataset import make_batch
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.memory.rank import Room
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.preferences import score_sides
from leaderless.training.engine import EngineSetup, TrainEngine, make_train_engine
from leaderless.worker.build import process
from leaderless.worker.build.process import open_worker
from leaderless.worker.evaluate import preferences
from leaderless.worker.evaluate.preferences import all_datasets
from leaderless.worker.rank_info import RankInfo

NUM_ROWS = 22
"""Rows of the data that are not overlong."""


def preference_recipe(folder: Path, workflow: str, changes: Mapping[str, object] | None = None) -> Path:
    """A recipe whose rows prefer the right sum, and its data."""
    sums = [(a, b) for a in range(1, 7) for b in range(2, 6)]
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 1}" + " or so" * (a % 2)} for a, b in sums
    ]
    singles = [{"prompt": f"{a}+{b}=", "completion": str(a + b + a % 2), "label": a % 2 == 0} for a, b in sums]
    write_rows(folder, "pairs.jsonl", pairs)
    write_rows(folder, "singles.jsonl", singles)
    data = dict(SINGLE_DATA if workflow == "kto" else PAIR_DATA)
    data["path"] = str(folder / data["path"])
    settings = {
        "workflow": workflow,
        "models": {"policy": moved_model()} | ({"reference": tiny_model()} if workflow in {"dpo", "kto"} else {}),
        "data.train": data,
        "data.evaluation": data,
        "data.max_response_tokens": 8,
        "evaluation": {"every_steps": 2, "max_prompts": 10},
        "reward": {},
        "batch": {"prompts_per_step": 10, "updates_per_step": 2, "micro_batch_tokens": 64},
        "optimizer.learning_rate": 1e-2,
        "algorithm.preference_loss.sft_coefficient": 0.1,
        "steps": 3,
    }
    return write_recipe(folder, moved_model(), settings | dict(changes or {}))


def numbers(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()
    kept = ("policy/", "evaluation/")
    return [{name: value for name, value in json.loads(line).items() if name.startswith(kept)} for line in lines]


def trained(ranks: RankPool, folder: Path, workflow: str, num_ranks: int, **changes: object) -> list[dict[str, float]]:
    folder.mkdir()
    recipe = preference_recipe(folder, workflow, changes)
    outcome = run(ranks, folder, "train", recipe, num_ranks=num_ranks)
    assert outcome.code == 0, outcome.errors
    return numbers(folder)


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "dp 2": (2, {"batch.micro_batch_tokens": 36}),
    "tp 2": (2, {"layout.policy": {"tp": 2}}),
    "cp 2": (2, {"layout.policy": {"cp": 2}}),
    "dp 4": (4, {}),
    "dp 2, tp 2": (4, {"layout.policy": {"dp": 2, "tp": 2}}),
}
"""Number of ranks, and how they divide the model and its rows."""
KINDS = ("pairs", "adapters", "images", "singles")
SHORT = {
    *(("pairs", "cp 2"), ("adapters", "tp 2"), ("images", "tp 2"), ("singles", "dp 2")),
}
"""What is tried each time; everything else is thorough."""


def settings_of(kind: str, folder: Path) -> tuple[str, dict[str, object]]:
    """The workflow of a kind of rows and model, and its settings."""
    if kind == "adapters":
        return "dpo", {"models": {"policy": {"path": moved_model(), "lora": {"rank": 4, "alpha": 8}}}}
    if kind != "images":
        return "kto" if kind == "singles" else "dpo", {}
    rows: list[dict[str, object]] = [
        {
            "prompt": f"how many {'<image>' * (1 + number % 2)}red squares? {number}",
            "image": [f"data:image/png;base64,{b64encode(picture(16, 16, number + one)).decode()}" for one in range(2)][
                : 1 + number % 2
            ],
            "chosen": str(number % 5),
            "rejected": f"red{number % 7}",
        }
        for number in range(8)
    ]
    data = PAIR_DATA | {"path": str(write_rows(folder, "images.jsonl", rows)), "images": "image"}
    sizes = {"data.train": data, "data.evaluation": data, "data.max_prompt_tokens": 60, "batch.micro_batch_tokens": 128}
    return "dpo", {"models": {"policy": vision_model()}, **sizes}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    """What one rank reports of a kind; each is run once."""

    @functools.cache
    def alone(kind: str) -> list[dict[str, float]]:
        return trained_as(ranks, tmp_path_factory.mktemp("alone"), kind, 1, {})

    return alone


def trained_as(
    ranks: RankPool, folder: Path, kind: str, num_ranks: int, layout: Mapping[str, object]
) -> list[dict[str, float]]:
    """What is reported of few rows, so that some ranks have none in some updates."""
    workflow, own = settings_of(kind, folder)
    sizes = {"batch.prompts_per_step": 3, "optimizer.learning_rate": 1e-3, "evaluation.max_prompts": 5, "steps": 2}
    return trained(ranks, folder / "run", workflow, num_ranks, **{**sizes, **own, **layout})


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in SHORT else pytest.mark.thorough)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_nothing_depends_on_ranks_or_layouts(
    ranks: RankPool, tmp_path: Path, alone: Callable[[str], list[dict[str, float]]], kind: str, layout: str
) -> None:
    expected = alone(kind)
    assert expected[0]["evaluation/loss"] != expected[-1]["evaluation/loss"]
    assert any("policy/sft_loss" in step for step in expected), "of rows that are desirable, where there are some"
    num_ranks, changes = LAYOUTS[layout]
    found = trained_as(ranks, tmp_path, kind, num_ranks, changes)
    for step, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        assert one == pytest.approx(wanted, rel=1e-5, abs=1e-5), f"step {step}"


@pytest.mark.parametrize("kind", ["adapters", "images"])
def test_the_reference_is_the_model_that_training_began_with(
    alone: Callable[[str], list[dict[str, float]]], kind: str
) -> None:
    first, *_, last = alone(kind)
    assert first["evaluation/loss"] == pytest.approx(math.log(2), abs=1e-6), "the policy is the reference"
    assert first["evaluation/margin"] == pytest.approx(0, abs=1e-6)
    assert abs(last["evaluation/margin"]) > 1e-4


def test_a_run_goes_on_as_if_it_had_never_stopped(ranks: RankPool, tmp_path: Path) -> None:
    settings: dict[str, object] = {"checkpoint.every_steps": 2}
    whole = trained(ranks, tmp_path / "whole", "kto", 1, **settings, steps=4)
    trained(ranks, tmp_path / "parts", "kto", 1, **settings, steps=2)
    outcome = run(ranks, tmp_path / "parts", "train", tmp_path / "parts/recipe.yaml", "steps=4")
    assert outcome.code == 0, outcome.errors
    assert numbers(tmp_path / "parts") == whole


def test_a_reference_without_finite_scores_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    with torch.no_grad():  # finite, but no logit with it is
        model.get_input_embeddings().weight[AutoTokenizer.from_pretrained(tiny_model()).encode("5")[0]] = 3e38
    shutil.copytree(tiny_model(), tmp_path / "broken")
    model.save_pretrained(tmp_path / "broken")
    models = {"policy": moved_model(), "reference": str(tmp_path / "broken")}
    outcome = run(ranks, tmp_path, "train", preference_recipe(tmp_path, "dpo", {"models": models}))
    assert outcome.code == 2
    assert "models.reference" in outcome.errors
    assert "no finite log-probability, such as that of" in outcome.errors
    assert not list((tmp_path / "runs").rglob("reference-*")), "nothing of it is kept"


def test_two_references_of_one_dataset_are_refused(tmp_path: Path) -> None:
    nodes = "{policy: {run: update_preferences, role: policy}, other: {run: update_preferences, role: other}}"
    (tmp_path / "two.yaml").write_text(f"name: two\nnodes: {nodes}\n")
    models = {"policy": moved_model(), "other": moved_model()}
    changes = {"models": models, "evaluation": {}, "data.evaluation": None}
    message = "reads scores of the reference 'other_reference', but node 'policy' reads those of 'reference'"
    assert message in refusal(tmp_path, str(tmp_path / "two.yaml"), changes)


def test_a_training_gives_what_was_compared_with_trl(ranks: RankPool, tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps(dpo_recipe(tmp_path)))
    outcome = run(ranks, tmp_path, "train", tmp_path / "recipe.yaml")
    assert outcome.code == 0, outcome.errors
    found = [json.loads(line) for line in (tmp_path / "runs/dpo/metrics.jsonl").read_text().splitlines()]
    stored = json.loads(STORED.read_text())["dpo"]
    assert len(found) == stored["steps"]
    for name in ("policy/loss", "policy/grad_norm"):
        assert found[0][name] == pytest.approx(stored[f"{name}, first"], abs=1e-5)
        assert found[-1][name] == pytest.approx(stored[f"{name}, last"], abs=1e-4)
        assert stored[f"{name}, difference"] < 1e-5, "as the page says"


def test_the_reference_scores_once_and_its_model_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[object]] = []
    order: list[str] = []

    def load(builder: process._Builder, room: Room) -> None:
        order.append("policy")
        load_roles(builder, room)

    def make(backend: str, setup: EngineSetup) -> TrainEngine:
        order.append("reference")
        engine = make_train_engine(backend, setup)
        made.append(weakref.ref(engine))
        return engine

    load_roles = process._Builder.load_roles
    monkeypatch.setattr(process._Builder, "load_roles", load)
    monkeypatch.setattr(preferences, "make_train_engine", make)
    monkeypatch.setattr(preferences, "ROWS_PER_PASS", 5)
    display, recipe = Display(Console(), is_shown=False), preference_recipe(tmp_path, "dpo")
    try:
        for model in (tiny_model(), tiny_model(), moved_model()):  # the second start finds what the first has kept
            loaded = load_recipe(recipe, [f"models.reference={model}"])
            plan = make_plan(loaded.recipe, resolve_workflow("dpo"), Cluster(1))
            with open_worker(loaded.recipe, plan, RankInfo.alone(), display) as worker:
                assert {one() for one in made} == {None}
                (found,) = all_datasets(worker.parts.sets)
                assert found.reference is not None
                assert worker.parts.held_out is not None
                assert worker.parts.held_out.reference is not None
                prompts = replace(found, reference=None).read(found.rows.tolist())
                rows = make_batch(range(NUM_ROWS), prompts, has_responses=False, has_preferences=True)
                expected = score_sides(engine_of(model), rows).double()
                torch.testing.assert_close(torch.from_numpy(found.reference), expected, rtol=1e-5, atol=1e-5)
            if dist.is_initialized():
                dist.destroy_process_group()
        assert order == ["reference", "policy", "policy", "reference", "policy"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    "workflow", ["orpo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("simpo", "ipo"))]
)
def test_other_losses_learn_the_preferences(ranks: RankPool, tmp_path: Path, workflow: str) -> None:
    losses = trained(ranks, tmp_path / "run", workflow, 1, **{"steps": 16, "evaluation.every_steps": 16})
    assert losses[-1]["evaluation/accuracy"] > losses[0]["evaluation/accuracy"]
    assert losses[-1]["evaluation/accuracy"] >= 0.9


def refusal(folder: Path, workflow: str, changes: Mapping[str, object]) -> str:
    def plan() -> None:
        loaded = load_recipe(preference_recipe(folder, workflow, changes))
        make_plan(loaded.recipe, resolve_workflow(workflow), Cluster(1))

    with pytest.raises(RecipeError) as caught:
        plan()
    return str(caught.value)


def test_recipes_that_cannot_learn_from_preferences_are_refused_with_the_remedy(tmp_path: Path) -> None:
    singles = {"path": "a.jsonl", "response": "a", "desirable": "b"}
    prompts = {"data.train": {"path": "a.jsonl"}, "data.evaluation": None, "evaluation": {}}
    stream = {"path": "a.jsonl", "chosen": "a", "rejected": "b", "streaming": True}
    for workflow, changes, message in (
        ("dpo", prompts, "the loss 'sigmoid' of node 'policy' learns from pairs: name chosen and rejected"),
        ("dpo", {"data.train": singles, "data.evaluation": singles}, "learns from pairs"),
        ("kto", {**prompts, "data.train": {**stream, "streaming": False}}, "learns from singles: name response and"),
        ("dpo", {"data.train": stream}, "cannot be combined with the loss 'sigmoid': the reference scores all rows"),
        ("dpo", {"data.evaluation": {"path": "a.jsonl"}}, "must be named in both data.train and data.evaluation"),
        ("dpo", {"batch.micro_batch_tokens": 20}, "a prompt with both of its responses may have 24 tokens"),
        ("simpo", {"models.reference": "elsewhere"}, "has this role"),
        ("dpo", {"batch.updates_per_step": 11}, "more than the 10 prompts of a step"),
    ):
        assert message in refusal(tmp_path, workflow, changes), changes


def test_eval_says_that_pairs_are_no_prompts(ranks: RankPool, tmp_path: Path) -> None:
    outcome = run(ranks, tmp_path, "eval", preference_recipe(tmp_path, "dpo"))
    assert outcome.code == 2
    assert "has responses that are compared, not prompts to answer" in outcome.errors
