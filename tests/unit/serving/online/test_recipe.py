"""Recipes of online runs: what they exclude, and what the planner makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.unit.recipes import only_problem

from leaderless.config import Recipe, RecipeError, dump_recipe
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.show.text import door_lines
from leaderless.planner.workflow import load_recipe, resolve_workflow

SETTINGS = {
    "name": "used",
    "workflow": "grpo",
    "models": {"policy": "/no/such/model"},
    "online": {},
    "steps": 3,
}


def read(folder: Path, **sections: object) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.dump(SETTINGS | sections))
    return load_recipe(path).recipe


def plan_of(recipe: Recipe, world_size: int = 1) -> Plan:
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(world_size))


def test_the_data_need_not_be_written_and_the_resolved_recipe_is_read_back(tmp_path: Path) -> None:
    recipe = read(tmp_path, data={"max_prompt_tokens": 64})
    assert recipe.data.max_prompt_tokens == 64
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe
    written = {"train": {"path": "online", "template": "chat", "system": "Be brief."}}
    assert read(tmp_path, data=written).data.train_sets()["data.train"].system == "Be brief."


@pytest.mark.parametrize(
    ("sections", "key", "text"),
    [
        ({"data": {"train": {"path": "rows.jsonl"}}}, "data.train", "must be left out"),
        ({"data": {"train": {"path": "online", "limit": 3}}}, "data.train", "must be left out"),
        ({"data": {"train": {"path": "online", "template": "{a}"}}}, "data.train.template", "auto, chat or plain"),
        ({"environment": {"type": "calculator"}}, "environment", "must be left out"),
        ({"evaluation": {"every_steps": 1}, "data": {"evaluation": {"path": "x"}}}, "evaluation", "must be 0"),
        ({"online": {"feedback": {}}}, "online.feedback", "at least one word"),
        ({"online": {"feedback": {"good": float("inf")}}}, "online.feedback.good", "finite"),
        ({"online": {"port": 70000}}, "online.port=70000", "65535"),
        ({"online": {"tool_format": "none"}}, "online.tool_format", "unknown format"),
        ({"workflow": "remax"}, "online", "decodes one more response greedily"),
        ({"workflow": "sft"}, "online", "no responses that node 'policy' could imitate"),
        ({"workflow": "happo"}, "online", "lets clients ask one role, but node 'solver_rollout' continues"),
        ({"rollout": {"engine": "vllm"}, "layout": {"rollout": {"tp": 2}}}, "layout.rollout", "leave out tp"),
    ],
)
def test_what_cannot_be_combined_is_refused(tmp_path: Path, sections: dict[str, object], key: str, text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(read(tmp_path, **sections), 2)
    problem = only_problem(caught.value)
    assert problem.key.startswith(key) or problem.message.startswith(key)
    assert text in str(problem)


def test_without_online_the_data_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.dump({name: value for name, value in SETTINGS.items() if name != "online"}))
    with pytest.raises(RecipeError, match=r"data: must be given"):
        load_recipe(path)


def test_samples_may_be_older_than_a_step_so_the_policy_scores_them_before_its_update(tmp_path: Path) -> None:
    plan = plan_of(read(tmp_path, online={"max_staleness": 5}))
    assert plan["policy"].max_staleness == 5
    assert "old_log_probs" in plan["policy"].reads
    behind = {
        "layout": {"rollout": {"ranks": "0"}, "reward": {"ranks": "0"}, "policy": {"ranks": "1"}},
        "channels": {"rollout": {"capacity": 2}},
    }
    assert plan_of(read(tmp_path, online={"max_staleness": 5}, **behind), 2)["policy"].max_staleness == 7


def test_each_replica_has_a_port(tmp_path: Path) -> None:
    recipe = read(tmp_path)
    assert door_lines(recipe, plan_of(recipe, 2)) == [
        ("rank 0", "http://127.0.0.1:8000/v1"),
        ("rank 1", "http://127.0.0.1:8001/v1"),
    ]
    free = read(tmp_path, online={"port": 0, "host": "::1"})
    assert door_lines(free, plan_of(free)) == [("rank 0", "[::1], any free port")]


@pytest.mark.parametrize("workflow", ["ppo", "dapo", "reinforce_pp", "gspo"])
def test_other_workflows_train_on_requests_as_well(tmp_path: Path, workflow: str) -> None:
    plan = plan_of(read(tmp_path, workflow=workflow))
    assert {"turn_rewards", "environment_rewards"} <= {*plan["rollout"].writes}
