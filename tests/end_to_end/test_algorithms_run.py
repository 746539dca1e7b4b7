"""Every algorithm that a recipe can name trains, and on two ranks as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps
from tests.tiny import tiny_model, write_recipe
from tests.unit.algorithms.overlay import with_new_files

from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.planner.graph.column_flow import ColumnFlow
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.planner.workflow.metrics import metrics_of

CASES: dict[str, dict[str, object]] = {
    **{
        workflow: {"workflow": workflow}
        for workflow in (
            "dr_grpo",
            "gspo",
            "cpgd",
            "cispo",
            "rloo",
            "reinforce_pp",
            "remax",
            "distillation",
        )
    },
    **{
        f"{kind} loss": {"algorithm.policy_loss": {"type": kind}}
        for kind in ("reinforce", "gmpo", "sapo", "clip_cov", "kl_cov", "dppo", "topr", "vespo")
    },
    "m2po loss": {"algorithm.policy_loss": {"type": "m2po", "threshold": 1e-9}},
    "dual clip": {"algorithm.policy_loss": {"dual_clip": 1.1}},
    **{f"{kind} advantage": {"algorithm.advantage": {"type": kind}} for kind in ("gdpo", "opo", "gpg", "reinforce_pp")},
    "pass at k": {"algorithm.advantage": {"type": "pass_at_k", "k": 2, "correct_at": 0.5}},
    "maxrl": {"algorithm.advantage": {"type": "maxrl", "correct_at": 0.5}},
    "rejection": {"workflow": "rejection", "algorithm.advantage.correct_at": 0.5},
    "baseline": {"algorithm.advantage": {"type": "reinforce_pp", "group_baseline": True, "discount": 0.9}},
    "kl in the reward": {"algorithm.kl": {"coefficient": 0.5, "place": "reward", "estimator": "k1", "target": 0.01}},
    "adaptive kl": {"algorithm.kl": {"coefficient": 0.5, "unbiased_gradient": True, "target": 0.01, "horizon": 100.0}},
    "token mean with entropy": {"algorithm.aggregation": "token_mean", "algorithm.entropy_coefficient": 0.1},
    "masked correction": {"algorithm.correction": {"type": "mask", "level": "geometric", "lowest": 0.999999}},
    "interpolated": {"algorithm.proximal": "interpolated", "algorithm.correction.type": "truncate"},
    "custom": {
        "workflow": "tests.end_to_end.own_algorithm:own_workflow",
        "algorithm.advantage": {"type": "tests.end_to_end.own_algorithm:OwnAdvantage", "baseline": 1.5},
        "algorithm.policy_loss": {"type": "tests.end_to_end.own_algorithm:OwnLoss", "strength": 2.0},
    },
    "overlong": {"algorithm.overlong": {"buffer_tokens": 4, "filter": True}},
    "gkd": {"workflow": "gkd"},
    "gkd of given words": {
        "workflow": "gkd",
        "algorithm.distillation": {"top_k": 7, "divergence": "jensen_shannon", "beta": 0.3, "temperature": 1.5},
    },
    "gkd by text": {"workflow": "gkd", "algorithm.distillation": {"top_k": 7, "align": "text"}},
    "gkd of itself": {
        "workflow": "gkd",
        "algorithm.distillation": {
            "top_k": 5,
            "teacher": "policy",
            "context": {"template": "{prompt}{answer}", "max_prompt_tokens": 12},
        },
    },
}
TAUGHT = ("distillation", "gkd", "gkd of given words")
"""Cases with a teacher."""
DIGITS = {"format": {"pattern": r".*\d.*"}}
SETTINGS: dict[str, object] = {
    "batch.updates_per_step": 2,
    "reward": {"tests.end_to_end.own_reward:own_reward": 1.0},
    "rollout.max_response_tokens": 8,
}


OVER_RANKS = (
    *("cpgd", "reinforce_pp", "remax", "distillation", "rejection", "custom"),
    *("clip_cov loss", "kl_cov loss", "dppo loss", "m2po loss", "gpg advantage", "baseline"),
    *(
        "adaptive kl",
        "token mean with entropy",
        "masked correction",
        "gkd",
        "gkd of given words",
        "gkd by text",
        "gkd of itself",
    ),
)
"""Algorithms that need numbers of all samples of a step, or columns of their own; the others add up what each sample
or each group gives, and groups are whole on a rank. GDPO is in test_features_on_ranks.py, with several rewards."""
OVER_STEPS = ("adaptive kl", "distillation", "masked correction")
"""Algorithms of which the second step depends on numbers of the first one; all others see both of its updates."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in OVER_RANKS])
def test_an_algorithm_trains_and_reports_what_it_declares(ranks: RankPool, tmp_path: Path, case: str) -> None:
    first, second = run(ranks, tmp_path, 1, case, 2, micro_batch_tokens=48)[0]
    for step in (first, second):
        assert step["numbers"]["policy/grad_norm"] > 1e-4, "there is something to learn"  # type: ignore[index]
    weights, after = first["weights"], second["weights"]
    assert any(not value.equal(after[name]) for name, value in weights.items())  # type: ignore[attr-defined, index]


@pytest.mark.parametrize(
    "case", [case if case in OVER_RANKS else pytest.param(case, marks=pytest.mark.thorough) for case in CASES]
)
def test_two_ranks_train_as_one_does(ranks: RankPool, tmp_path: Path, case: str) -> None:
    num_steps = 2 if case in OVER_STEPS else 1
    single = run(ranks, tmp_path, 1, case, num_steps, micro_batch_tokens=4096)
    several = run(ranks, tmp_path, 2, case, num_steps, micro_batch_tokens=48)
    for step in range(num_steps):
        expected, result = merged(single, step), merged(several, step)
        assert result["samples"] == expected["samples"], f"step {step + 1}"
        norm = expected["numbers"]["policy/grad_norm"]  # type: ignore[index]
        assert norm > 1e-4, "there is something to learn"
        assert result["numbers"]["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)  # type: ignore[index]
        for name, weights in expected["weights"].items():  # type: ignore[attr-defined]
            other = result["weights"][name]  # type: ignore[index]
            assert float((other - weights).norm() / weights.norm()) < 1e-4, name


def run(
    ranks: RankPool, folder: Path, world_size: int, case: str, num_steps: int, *, micro_batch_tokens: int
) -> list[list[Step]]:
    """Some steps of a case."""
    changes = SETTINGS | {"batch.micro_batch_tokens": micro_batch_tokens} | CASES[case]
    if case in TAUGHT:
        changes = {**changes, "models.reference": tiny_model("qwen3")}
    if case == "gkd by text":
        changes = {**changes, "models.reference": model_of_words(folder / "words")}
    recipe = write_recipe(folder, tiny_model(num_layers=1), changes)
    steps = ranks.run(world_size, walk_steps, str(recipe), f"on-{world_size}", num_steps, init_group=False)
    assert names_in(merged(steps, num_steps - 1)["numbers"]) == reported_by(recipe)
    return steps


def model_of_words(folder: Path) -> str:
    """A model whose tokenizer has the same digits as the student's in another order, and pairs of them as words."""
    pairs = [f"{one}{other}" for one in "0123456789" for other in "02468"]
    return str(write_tiny_model(folder, ["+", "=", *"9876543210"], words=pairs, num_layers=1, seed=3))


def names_in(numbers: Mapping[str, float]) -> set[str]:
    """Metrics that do not depend on the course of a run."""
    on_course = "guard/", "time/", "seconds/", "mismatch/kl_by_age/"
    return {name for name in numbers if not name.startswith(on_course) and not name.endswith("updates_without_signal")}


def reported_by(path: Path) -> set[str]:
    """Metrics that the contracts of its stages declare for a recipe."""
    recipe = load_recipe(path).recipe
    workflow = resolve_workflow(recipe.workflow)
    return names_in(dict.fromkeys(metrics_of(recipe, ColumnFlow(recipe, workflow).order, workflow), 0.0))


def test_decoupled_ppo_runs_as_its_recipe_says_on_samples_of_older_weights(ranks: RankPool, tmp_path: Path) -> None:
    written = yaml.safe_load((ROOT / "recipes/quickstart/decoupled_ppo.yaml").read_text(encoding="utf-8"))
    settings = {name: written[name] for name in ("workflow", "algorithm")} | {"batch.updates_per_step": 2}
    # Not in every group, so that some wait for the next step.
    recipe = write_recipe(
        tmp_path, tiny_model(num_layers=1), {**settings, "reward": DIGITS, "rollout.max_response_tokens": 8}
    )
    (steps,) = ranks.run(1, walk_steps, str(recipe), "decoupled", 2, init_group=False)
    first, second = (step["numbers"] for step in steps)
    assert names_in(second) == reported_by(recipe)  # type: ignore[arg-type]
    assert first["rollout/staleness"] == 0  # type: ignore[index]
    assert first["correction/weight"] == pytest.approx(1, abs=1e-4)  # type: ignore[index]
    assert second["rollout/staleness"] > 0  # type: ignore[index]
    assert abs(second["correction/weight"] - 1) > 1e-3  # type: ignore[index]
    assert second["policy/grad_norm"] > 1e-4  # type: ignore[index]


@pytest.mark.thorough
def test_an_advantage_and_a_loss_of_one_new_file_each_train_on_two_ranks(tmp_path: Path) -> None:
    algorithm = {"advantage": {"type": "harmonic", "power": 3}, "policy_loss": {"type": "root", "root": 3}}
    changes = {"algorithm": algorithm, "reward": DIGITS, "batch.updates_per_step": 2}
    recipe = write_recipe(tmp_path, tiny_model(), changes)
    environment = {**os.environ, "PYTHONPATH": str(with_new_files(tmp_path / "src")), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "leaderless", "train", str(recipe), "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["policy/root"] == pytest.approx(1, abs=0.1)
    assert first["harmonic/baseline"] > 0
    assert second["policy/grad_norm"] > 0


def test_every_type_of_advantage_and_loss_is_tried() -> None:
    tried = {"grpo", "ppo"} | {str(value) for case in CASES.values() for value in named_types(case)}
    workflows = {
        "gspo",
        "cpgd",
        "cispo",
        "rloo",
        "remax",
        "distillation",
        "rejection",
        "gae",  # tested with the critic
        *("body_gae", "srpo"),  # tested with bodies
        *("chained_gae", "dr_mas", "magrpo", "rae"),  # tested with several agents
    }
    assert {*ADVANTAGES, *POLICY_LOSSES} <= tried | workflows


def named_types(settings: dict[str, object]) -> list[object]:
    """The name of a case, from its sections."""
    return [section["type"] for section in settings.values() if isinstance(section, dict) and "type" in section]
