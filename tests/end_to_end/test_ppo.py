"""PPO as a whole: the fork of policy and critic gives one result on any layout, and when it is stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps
from tests.tiny import tiny_model, write_recipe
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.worker.build.process import open_worker
from leaderless.worker.checkpoint.export import export_model
from leaderless.worker.rank_info import RankInfo

SETTINGS: dict[str, object] = {
    "workflow": "ppo",
    "batch.updates_per_step": 2,
    "algorithm.kl.coefficient": 0.05,
    "algorithm.critic": {"warmup_steps": 1, "value_clip": 0.02},
    "reward": {"format": {"pattern": r".*\d.*"}},
    "steps": 4,
}
"""An untrained model writes a digit now and then, so that there is something to learn."""
CRITIC = {"optimizer": {"learning_rate": 3e-3, "schedule": "linear"}}
METRICS = ("loss", "grad_norm", "clip_fraction", "explained_variance", "value_mean", "learning_rate")
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "2 ranks": (2, {}),
    "critic on 0, policy on 1": (2, {"layout": {"policy": {"ranks": "1"}, "critic": {"ranks": "0"}}}),
    "values on 0-1, critic on 2, policy on 3": (
        4,
        {
            "layout": {
                "rollout": {"ranks": "0-1"},
                "values": {"ranks": "0-1"},
                "critic": {"ranks": "2"},
                "policy": {"ranks": "3"},
            }
        },
    ),
}


def ppo_recipe(folder: Path, changes: dict[str, object] | None = None) -> str:
    critic = {"models.critic": tiny_model(num_layers=1), "roles.critic": CRITIC}
    return str(write_recipe(folder, tiny_model(num_layers=1), SETTINGS | critic | (changes or {})))


def numbers_of(step: Step) -> dict[str, float]:
    return step["numbers"]  # type: ignore[return-value]


def weights_of(step: Step, role: str) -> dict[str, Tensor]:
    return {name: w for name, w in step["weights"].items() if name.startswith(f"{role}.")}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def single(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[list[Step]]:
    """Three steps on one rank, for comparison."""
    return ranks.run(1, walk_steps, ppo_recipe(tmp_path_factory.mktemp("single")), "single", 3, init_group=False)


@pytest.mark.parametrize(
    "layout",
    [  # a critic and a policy on the same two ranks are in tests/end_to_end/test_features_on_ranks.py, too
        pytest.param(layout, marks=pytest.mark.thorough if layout == "2 ranks" else ()) for layout in LAYOUTS
    ],
)
def test_policy_and_critic_are_those_of_one_rank(
    ranks: RankPool, tmp_path: Path, single: list[list[Step]], layout: str
) -> None:
    world_size, changes = LAYOUTS[layout]
    several = ranks.run(world_size, walk_steps, ppo_recipe(tmp_path, changes), "several", 3, init_group=False)
    for step, (whole, result) in enumerate((merged(single, i), merged(several, i)) for i in range(3)):
        assert result["samples"] == whole["samples"], f"step {step + 1}"
        for name in [f"critic/{measure}" for measure in METRICS]:
            assert numbers_of(result)[name] == pytest.approx(numbers_of(whole)[name], rel=1e-3, abs=1e-4), name
        for name, weights in whole["weights"].items():  # type: ignore[attr-defined]
            other = result["weights"][name]  # type: ignore[index]
            assert float((other - weights).norm() / weights.norm().clamp(min=1e-3)) < 1e-4, f"{name}, step {step + 1}"
    last = numbers_of(single[0][2])
    assert last["critic/grad_norm"] > 0.01, "there is something to learn"
    assert last["critic/clip_fraction"] > 0, "the second update meets the clip"


def test_the_policy_waits_for_the_critic_and_then_learns(ranks: RankPool, tmp_path: Path) -> None:
    changes = {
        "algorithm.critic": {"warmup_steps": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
        "steps": 4,
    }
    (steps,) = ranks.run(1, walk_steps, ppo_recipe(tmp_path, changes), "waits", 4, init_group=False)
    begin = AutoModelForCausalLM.from_pretrained(tiny_model(num_layers=1)).state_dict()
    for number, step in enumerate(steps, start=1):
        policy = weights_of(step, "policy")
        is_same = all(torch.equal(w, begin[name.removeprefix("policy.")]) for name, w in policy.items())
        assert is_same == (number <= 2), f"step {number}"
        assert ("policy/loss" in numbers_of(step)) == (number > 2)
        assert "critic/loss" in numbers_of(step)
        assert numbers_of(step)["throughput/tokens_per_s"] > 0
    # The policy has two steps of two updates: its rate falls over these four, the critic's over all eight.
    rates = [numbers_of(step).get("policy/learning_rate") for step in steps]
    assert rates == [None, None, pytest.approx(1e-3), pytest.approx(1e-3 / 3)]
    critic_rates = [numbers_of(step)["critic/learning_rate"] for step in steps]
    assert critic_rates == pytest.approx([3e-3 * share / 7 for share in (7, 5, 3, 1)])


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).clone()


def train_until(recipe_file: str, name: str, steps: int) -> dict[str, Tensor]:
    """Weights and optimizers of all roles after a run, which may be the rest of another."""
    loaded = load_recipe(recipe_file, [f"name={name}"])
    recipe = loaded.recipe.model_copy(update={"steps": steps})
    place = RankInfo.from_environment()
    # The schedule is that of the whole run, wherever this part of it ends.
    plan = make_plan(loaded.recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        worker.run()
        engines = worker.parts.roles.trained().items()
        parts = {f"{role}.{key}": local(value) for role, engine in engines for key, value in engine.state().items()}
        versions = {f"{role}.version": torch.tensor(engine.policy_version) for role, engine in engines}
    return parts | versions


def test_a_run_that_was_stopped_goes_on_bit_by_bit(ranks: RankPool, tmp_path: Path) -> None:
    recipe = ppo_recipe(tmp_path)
    (whole,) = ranks.run(1, train_until, recipe, "whole", 4, init_group=False)
    ranks.run(1, train_until, recipe, "parts", 2, init_group=False)
    (parts,) = ranks.run(1, train_until, recipe, "parts", 4, init_group=False)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    assert (int(whole["policy.version"]), int(whole["critic.version"])) == (6, 8)


def test_a_checkpoint_of_two_ranks_is_exported_in_the_form_of_transformers(ranks: RankPool, tmp_path: Path) -> None:
    recipe = ppo_recipe(tmp_path, {"steps": 2})
    saved = ranks.run(2, train_until, recipe, "saved", 2, init_group=False)
    loaded = ranks.run(2, train_until, recipe, "saved", 2, init_group=False)
    for before, after in zip(saved, loaded, strict=True):
        assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not len(saved[1]["critic.weights.score.weight"]), "a head of one row lies on one rank"
    checkpoint = tmp_path / "runs/saved/checkpoints/step-000002"
    policy = AutoModelForCausalLM.from_pretrained(export_model(checkpoint, "policy", tmp_path / "policy"))
    assert policy.config.architectures == ["Qwen2ForCausalLM"]
    path = export_model(checkpoint, "critic", tmp_path / "critic")
    critic, info = AutoModelForTokenClassification.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert (critic.config.num_labels, critic.config.architectures) == (1, ["Qwen2ForTokenClassification"])
    assert critic.score.weight.abs().sum() > 0
    again = ppo_recipe(tmp_path, {"models.critic": str(path)})
    (first,) = ranks.run(1, walk_steps, again, "again", 1, init_group=False)[0]
    assert numbers_of(first)["critic/value_mean"] != 0.0, "the exported critic already expects something"
