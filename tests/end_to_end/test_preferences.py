"""Runs that learn from preferences: nothing depends on ranks, passes or an earlier start, and the reference is gone."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import run
from tests.preferences import PAIR_DATA, SINGLE_DATA, moved_model, write_rows
from tests.tiny import tiny_model, write_recipe

from leaderless.config import RecipeError
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.training.engine import EngineSetup, TrainEngine
from leaderless.training.registry import make_train_engine
from leaderless.worker import process, reference
from leaderless.worker.place import Place
from leaderless.worker.process import open_worker
from leaderless.workflow import load_recipe, resolve_workflow

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


@pytest.mark.parametrize(("workflow", "places"), [("dpo", [("2", 2, 30), ("4", 4, 64)]), ("kto", [("2", 2, 30)])])
def test_nothing_depends_on_ranks_or_micro_batches(
    ranks: RankPool, tmp_path: Path, workflow: str, places: list[tuple[str, int, int]]
) -> None:
    expected = trained(ranks, tmp_path / "1", workflow, 1)
    assert "evaluation/loss" in expected[-1]
    assert "policy/sft_loss" in expected[-1]
    for name, num_ranks, tokens in places:
        others = trained(ranks, tmp_path / name, workflow, num_ranks, **{"batch.micro_batch_tokens": tokens})
        for step, (found, wanted) in enumerate(zip(others, expected, strict=True)):
            assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5), f"step {step} of {name}"


def test_the_reference_scores_once_and_its_model_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[object]] = []
    order: list[str] = []

    def load(builder: process._Builder) -> None:
        order.append("policy")
        load_roles(builder)

    def make(backend: str, setup: EngineSetup) -> TrainEngine:
        order.append("reference")
        engine = make_train_engine(backend, setup)
        made.append(weakref.ref(engine))
        return engine

    load_roles = process._Builder.load_roles
    monkeypatch.setattr(process._Builder, "load_roles", load)
    monkeypatch.setattr(reference, "make_train_engine", make)
    loaded = load_recipe(preference_recipe(tmp_path, "dpo"))
    plan = make_plan(loaded.recipe, resolve_workflow("dpo"), Cluster(1))
    display = Display(Console(), is_shown=False)
    try:
        for _ in range(2):  # the second start finds what the first one has kept
            with open_worker(loaded.recipe, plan, Place.alone(), display) as worker:
                assert [one() for one in made] == [None]
                assert worker.parts.sets[0].reference.shape == (NUM_ROWS, 2)  # type: ignore[attr-defined]
                assert worker.parts.held_out is not None
                assert worker.parts.held_out.reference is not None
            if dist.is_initialized():
                dist.destroy_process_group()
        assert order == ["reference", "policy", "policy"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("workflow", ["simpo", "orpo", "ipo"])
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
