"""The plan of a workflow with a critic."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.unit.recipes import make_recipe, only_problem, plan_of, write_model

from leaderless.algorithms.settings import CriticConfig
from leaderless.config import Problem, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner import Cluster, Plan, SyncWeights, make_plan
from leaderless.planner.memory.model_size import read_model_size
from leaderless.planner.workflow import Workflow, resolve_workflow, stage
from leaderless.planner.workflow.read import evaluation_workflow


def ppo(world_size: int = 1, algorithm: Mapping[str, object] | None = None, **sections: object) -> Plan:
    """The plan of PPO, with additional settings of the algorithm."""
    workflow = resolve_workflow("ppo")
    sections["algorithm"] = {**workflow.algorithm, **(algorithm or {})}
    return make_plan(make_recipe(**sections), workflow, Cluster(world_size))


def refused(**sections: object) -> Problem:
    with pytest.raises(RecipeError) as caught:
        ppo(**sections)
    return only_problem(caught.value)


@stage(reads=["values"], has_effect=True)
def keep(batch, context):
    """Uses values."""


def test_policy_and_critic_are_a_fork_behind_the_advantage():
    plan = ppo()
    assert [str(entry) for entry in plan.schedule] == [
        *("load", "rollout", "reward", "values", "advantage", "samples", "policy", "critic")
    ]
    before = resolve_workflow("ppo").ancestors()
    assert "critic" not in before["policy"]
    assert "policy" not in before["critic"]
    assert dict(plan["critic"].reads) == {
        **dict.fromkeys(("prompt_tokens", "tokens", "response_mask"), "rollout"),
        "reward_valid": "reward",
        "returns": "advantage",
        "values": "values",
    }


def test_only_what_the_settings_need_is_run():
    assert ppo().pruned == ("old", "reference")
    assert ppo(batch={"updates_per_step": 2}).pruned == ("reference",)
    kl = {"kl": {"place": "reward", "estimator": "k1", "coefficient": 0.1}}
    assert ppo(algorithm=kl).pruned == ()


def test_the_critic_is_a_role_of_its_own_with_its_number_of_updates():
    plan = ppo(algorithm={"critic": {"warmup_steps": 2}}, steps=5, batch={"updates_per_step": 3})
    updates = {instance.role: (instance.is_critic, instance.num_updates) for instance in plan.instances}
    assert updates == {"policy": (False, 9), "critic": (True, 15)}


def test_values_follow_the_critic_or_its_weights_follow_them():
    plan = ppo(4, layout={"critic": {"ranks": "2-3"}})
    assert plan["values"].layout == plan["critic"].layout
    plan = ppo(4, layout={"critic": {"ranks": "2-3"}, "values": {"ranks": "0-1"}})
    (sync,) = [entry for entry in plan.schedule if isinstance(entry, SyncWeights) and entry.role == "critic"]
    assert (sync.source_layout.ranks, sync.target_layout.ranks) == ((2, 3), (0, 1))
    copies = {instance.layout.ranks: instance.is_critic for instance in plan.instances if instance.role == "critic"}
    assert copies == {(2, 3): True, (0, 1): True}


def test_a_critic_has_a_head_of_one_output_and_no_logits(tmp_path):
    path = write_model(tmp_path / "m", tie_word_embeddings=False)
    language, critic = read_model_size(ModelConfig(path=path)), read_model_size(ModelConfig(path=path), is_critic=True)
    assert language is not None
    assert critic is not None
    assert language.num_parameters - critic.num_parameters == 1000 * 64 - (64 + 1)
    estimate = ppo(2, models={"policy": path}, batch={"prompts_per_step": 512}).memory
    assert estimate is not None
    memory = estimate.accelerator
    assert memory.resident["critic optimizer"] == 2 * -(-critic.num_parameters * 4 // 2)
    assert "logits" not in memory.phases["critic trains"]
    assert memory.phases["policy trains"]["logits"] > 0


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        (
            {"algorithm": {"advantage": {"type": "grpo"}}},
            "nodes.critic",
            "algorithm.advantage.type=gae or chained_gae: set it, or use a workflow without a critic, as grpo",
        ),
        (
            {"algorithm": {"critic": {"warmup_steps": 3}}},
            "algorithm.critic.warmup_steps",
            "is 3, so that node 'policy' would train nothing in 3 steps",
        ),
        (
            {"batch": {"prompts_per_step": 1, "updates_per_step": 2}},
            "batch.updates_per_step",
            "more than the 1 prompts of a step",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_critic_are_refused(sections, key, message):
    problem = refused(**sections)
    assert problem.key == key
    assert message in problem.message


@pytest.mark.parametrize(
    ("algorithm", "key", "message"),
    [
        ({"advantage": {"type": "gae"}}, "nodes.advantage", "a critic does: use the workflow ppo"),
        (
            {"critic": {"warmup_steps": 1}},
            "algorithm.critic.warmup_steps",
            "is 1, but no node of the workflow 'grpo' trains a critic: leave it out",
        ),
        ({"critic": {"value_clip": 0.5}}, "algorithm.critic.value_clip", "is 0.5, but no node of the workflow 'grpo'"),
        ({"critic": {"value_clip": None}}, "algorithm.critic.value_clip", "is None, but no node of the workflow"),
    ],
)
def test_settings_that_need_a_critic_are_refused_without_one(algorithm, key, message):
    with pytest.raises(RecipeError) as caught:
        plan_of("grpo", algorithm=algorithm)
    problem = only_problem(caught.value)
    assert problem.key == key
    assert message in problem.message


def test_a_critic_setting_that_is_its_default_needs_no_critic():
    """A run's saved recipe contains every default, and can be planned again."""
    written = {name: field.default for name, field in CriticConfig.model_fields.items()}
    assert plan_of("grpo", algorithm={"critic": written}).workflow == "grpo"


def test_a_held_out_run_of_a_ppo_recipe_trains_no_critic_and_is_not_refused():
    recipe = make_recipe(
        workflow="ppo",
        data={"train": {"path": "a"}, "evaluation": {"path": "b"}},
        algorithm={"critic": {"value_clip": 0.5}},
    )
    assert make_plan(recipe, evaluation_workflow("policy"), Cluster(1)).workflow == "evaluation"


def test_one_role_is_not_both_a_critic_and_a_language_model():
    workflow = Workflow("own").node("rollout", run="rollout", role="policy")
    workflow = workflow.node("values", run="values", role="policy", after="rollout")
    workflow = workflow.node("keep", run="tests.unit.planner.test_ppo_plan:keep", after="values")
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow)
    problem = only_problem(caught.value)
    assert problem.key == "nodes.values.role"
    assert "is a critic for node 'values' (values) and a language model for node 'rollout'" in problem.message


def test_a_workflow_with_nothing_but_a_critic_answers_no_held_out_prompts():
    workflow = Workflow("critic").node("values", run="values", role="critic")
    workflow = workflow.node("keep", run="tests.unit.planner.test_ppo_plan:keep", after="values")
    data = {"train": {"path": "rows.jsonl", "response": "answer"}, "evaluation": {"path": "more.jsonl"}}
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow, models={"critic": "p"}, data=data, evaluation={"every_steps": 1})
    assert "no language model that could answer" in only_problem(caught.value).message
