from __future__ import annotations

import pytest
import yaml
from tests.unit.recipes import make_recipe, only_problem, plan_of, write_model, write_recipe

from leaderless.algorithms.losses.gspo import GspoLoss
from leaderless.config import RecipeError, dump_recipe, load_recipe
from leaderless.config.source import RecipeSource
from leaderless.planner import answering
from leaderless.planner.workflow import Workflow, stage


def problem_of(path, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    (problem,) = caught.value.problems
    return problem


def test_a_role_has_the_optimizer_of_the_recipe_unless_it_has_its_own():
    roles = {"critic": {"optimizer": {"learning_rate": 1e-4}}}
    recipe = make_recipe(optimizer={"learning_rate": 1e-5, "beta2": 0.5}, roles=roles)
    assert recipe.as_seen_by("policy") is recipe.as_seen_by(None)
    assert recipe.as_seen_by("policy").optimizer.learning_rate == 1e-5
    own = recipe.as_seen_by("critic").optimizer
    assert (own.learning_rate, own.beta2) == (1e-4, 0.5), "what the role does not give is as in general"


def test_a_role_s_settings_are_merged_below_those_of_the_workflow():
    def defaults(_: str) -> dict[str, object]:
        return {"algorithm": {"policy_loss": {"clip_high": 0.28}, "kl": {"coefficient": 0.1}}}

    general = {"algorithm": {"kl": {"coefficient": 0.2}}}
    roles = {
        "solver": {"algorithm": {"kl": {"estimator": "k2"}}},
        "judge": {"algorithm": {"policy_loss": {"type": "gspo"}}},
    }
    settings = make_recipe().model_dump(mode="json", exclude_unset=True) | general | {"roles": roles}
    recipe = load_recipe(RecipeSource(settings, {}), defaults_of=defaults).recipe
    solver, judge = recipe.as_seen_by("solver").algorithm, recipe.as_seen_by("judge").algorithm
    assert (solver.kl.coefficient, solver.kl.estimator, solver.policy_loss.clip_high) == (0.2, "k2", 0.28)
    assert (judge.kl.coefficient, judge.policy_loss) == (0.2, GspoLoss()), "another type inherits nothing"
    assert load_recipe(RecipeSource(yaml.safe_load(dump_recipe(recipe)), {})).recipe == recipe


def test_rows_are_read_with_the_settings_of_the_role_that_sampled_them():
    roles = {
        "solver": {"algorithm": {"entropy_coefficient": 0.5}, "rollout": {"temperature": 0.5}},
        "judge": {"rollout": {"max_response_tokens": 900}},
        "critic": {"algorithm": {"critic": {"value_clip": 9.0}}, "rollout": {"temperature": 0.1}},
    }
    recipe = make_recipe(roles=roles)
    reference, critic = recipe.as_seen_by("reference", ["solver"]), recipe.as_seen_by("critic", ["solver"])
    assert (reference.algorithm.entropy_coefficient, reference.rollout.temperature) == (0.5, 0.5)
    assert (critic.algorithm.critic.value_clip, critic.rollout.temperature) == (9.0, 0.5)
    both = recipe.as_seen_by(None, ["solver", "judge"])
    assert (both.algorithm, both.rollout.max_response_tokens) == (recipe.algorithm, 900)
    assert recipe.longest_response(["solver", "judge"]) == 900
    assert recipe.longest_response([]) == recipe.rollout.max_response_tokens


def test_errors_of_a_role_s_settings_name_the_line_that_was_written(tmp_path):
    own = "algorithm:\n  kl: {{coefficient: -1}}\nroles:\n  solver:\n    algorithm:\n      {}\n"
    path = write_recipe(tmp_path, more=own.format("entropy_coefficient: -2"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    first = path.read_text().splitlines().index("algorithm:") + 1
    assert [(p.key, p.place) for p in caught.value.problems] == [
        ("algorithm.kl.coefficient=-1", f"{path}:{first + 1}"),
        ("roles.solver.algorithm.entropy_coefficient=-2", f"{path}:{first + 5}"),
    ]
    path = write_recipe(tmp_path, more=own.format("kl: {target: 1.0}").replace("-1", "0"))
    problem = problem_of(path)
    assert problem.key == "roles.solver", problem
    assert problem.message.startswith("algorithm.kl.target needs kl.coefficient > 0"), problem
    assert problem.place == f"{path}:{first + 5}"
    path = write_recipe(tmp_path, more="roles: {solver: {algorithm: {zzz: 1}}}\n")
    problem = problem_of(path)
    assert problem.key == "roles.solver.algorithm.zzz"


def test_a_setting_of_all_roles_is_not_one_s_own(tmp_path):
    problem = problem_of(write_recipe(tmp_path, more="roles: {solver: {algorithm: {repeat: {max_rounds: 3}}}}\n"))
    assert problem.message == "roles.solver.algorithm.repeat must be that of all roles: set algorithm.repeat"


def test_the_optimizer_of_a_model_is_said_to_be_the_role_s(tmp_path):
    problem = problem_of(write_recipe(tmp_path), ["models.policy.optimizer={learning_rate: 1.0}"])
    assert problem.key == "models.policy.optimizer"
    assert problem.message == "unknown key: a role has its own optimizer as 'roles.policy.optimizer'"


def refusal(workflow="grpo", **sections):
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow, **sections)
    return only_problem(caught.value)


@pytest.mark.parametrize(
    ("roles", "key", "rule"),
    [
        ({"plicy": {"optimizer": {"beta1": 0.5}}}, "roles.plicy", "has this role (did you mean 'policy'?)"),
        ({"reference": {"optimizer": {"beta1": 0.5}}}, "roles.reference.optimizer", "no node trains role 'reference'"),
        ({"reference": {"rollout": {"top_k": 5}}}, "roles.reference.rollout", "no node samples with role 'reference'"),
        ({"reference": {"algorithm": {"aggregation": "token_mean"}}}, "roles.reference.algorithm", "does nothing"),
        ({"policy": {"rollout": {"temperature": 0}}}, "roles.policy.rollout.temperature", "must be above 0"),
        ({"policy": {"algorithm": {"critic": {"value_clip": 1}}}}, "roles.policy.algorithm.critic.value_clip", "is 1"),
    ],
)
def test_settings_of_a_role_that_do_nothing_or_cannot_work_are_refused(roles, key, rule):
    problem = refusal(roles=roles, algorithm={"kl": {"coefficient": 0.1}})
    assert problem.key == key
    assert rule in problem.message


HELD_OUT = {"data": {"train": {"path": "a.jsonl"}, "evaluation": {"path": "b.jsonl", "answer": "answer"}}}


@pytest.mark.parametrize("evaluated", [None, "critic", "reference"])
def test_sampling_settings_are_those_of_a_role_that_samples_or_is_evaluated(evaluated):
    sections = HELD_OUT | {"evaluation": {"every_steps": 1, "role": evaluated}}
    sections |= {"algorithm": {"advantage": {"type": "gae"}, "kl": {"coefficient": 0.1}}}
    for role in ("critic", "reference"):
        roles = {role: {"rollout": {"min_p": 0.1}}}
        if evaluated == role == "reference":
            plan_of("ppo", **sections, roles=roles)
            continue
        problem = refusal("ppo", **sections, roles=roles)
        if evaluated == "critic":
            assert problem.key == "evaluation.role"
            assert "is 'critic', but no node that runs in the workflow 'ppo' uses a language model" in problem.message
        else:
            assert problem.key == f"roles.{role}.rollout"
            assert "and it is not evaluated: leave it out" in problem.message


def test_the_role_that_is_evaluated_is_the_first_that_generates_or_the_one_that_is_named():
    plan = plan_of("ppo", 2, algorithm={"advantage": {"type": "gae"}}, layout={"policy": {"ranks": "0-1"}})
    assert answering(plan.instances).role == "policy"
    workflow = Workflow("two").node("first_rollout", run="rollout", role="first")
    workflow = workflow.node("second_rollout", run="rollout", role="second")
    workflow = workflow.node("reward", run="reward", after=["first_rollout", "second_rollout"])
    workflow = workflow.node("keep", run="record", after="gain").node("gain", run="advantage", after="reward")
    both = {"models": {"first": "a", "second": "b"}}
    instances = plan_of(workflow, **both).instances
    assert [answering(instances, role).role for role in (None, "first", "second")] == ["first", "first", "second"]
    problem = refusal(workflow, **both, evaluation={"role": "seconds"})
    assert (problem.key, "did you mean 'second'?" in problem.message) == ("evaluation.role", True)


def test_one_role_of_a_node_is_not_both_a_critic_and_a_language_model():
    roles = {"actor": "policy", "judge": "policy"}
    workflow = Workflow("own").node("rollout", run="rollout", role="policy")
    workflow = workflow.node("both", run=f"{__name__}:both", roles=roles, after="rollout")
    assert "is a critic for node 'both'" in refusal(workflow).message


@stage(reads=["tokens"], roles={"actor": "train", "judge": "score"}, critics=["judge"])
def both(batch, context):
    """A stage with a policy and a critic."""


def test_the_settings_of_a_role_decide_what_its_nodes_read(tmp_path):
    settings = {"algorithm": {"kl": {"coefficient": 0.1}, "overlong": {"filter": True}}}
    plan = plan_of("grpo", roles={"policy": settings})
    assert plan["policy"].reads.keys() >= {"ref_log_probs", "truncated"}
    assert "truncated" in plan["advantage"].reads, "the advantage is of the policy's samples"
    assert "reference" not in [node.name for node in plan_of("grpo").nodes]


def test_memory_counts_what_a_role_needs_to_be_evaluated(tmp_path):
    data = {"train": {"path": "a.jsonl", "response": "answer"}, "evaluation": {"path": "b.jsonl", "answer": "answer"}}
    models = {"policy": write_model(tmp_path / "model")}
    without, with_evaluation = (
        plan_of("sft", models=models, data=data, evaluation={"every_steps": every}).memory.cpu for every in (0, 1)
    )
    assert "policy generates" not in without.phases
    assert with_evaluation.phases["policy generates"]["kv cache"] > 0


def test_memory_counts_no_answers_where_held_out_preferences_are_scored(tmp_path):
    pairs = {"path": "a.jsonl", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    data = {"train": pairs, "evaluation": pairs, "max_prompt_tokens": 64, "max_response_tokens": 64}
    plan = plan_of("dpo", models={"policy": write_model(tmp_path / "m")}, data=data, evaluation={"every_steps": 1})
    assert "policy generates" not in plan.memory.cpu.phases


def test_memory_counts_the_longest_response_of_a_role(tmp_path):
    models = {"policy": write_model(tmp_path / "model")}
    short, long = (
        plan_of("grpo", models=models, roles={"policy": {"rollout": {"max_response_tokens": tokens}}})
        for tokens in (64, 2048)
    )
    assert (
        short.memory.cpu.phases["policy generates"]["kv cache"] * 8
        < (long.memory.cpu.phases["policy generates"]["kv cache"])
    )
    edges = {edge.target: edge.max_bytes for edge in short.edges if edge.source == "rollout"}
    more = {edge.target: edge.max_bytes for edge in long.edges if edge.source == "rollout"}
    assert edges["reward"] < more["reward"]


def test_warm_up_steps_of_a_role_count_in_its_updates(tmp_path):
    roles = {"policy": {"algorithm": {"critic": {"warmup_steps": 2}}}}
    plan = plan_of("ppo", roles=roles, algorithm={"advantage": {"type": "gae"}})
    assert {instance.role: instance.num_updates for instance in plan.instances if instance.is_trained} == {
        "policy": 1,
        "critic": 3,
    }


def test_each_role_has_its_engine(tmp_path):
    workflow = Workflow("two")
    for role in ("first", "second"):
        workflow = workflow.node(f"{role}_rollout", run="rollout", role=role)
    workflow = workflow.node("reward", run="reward", after=["first_rollout", "second_rollout"])
    workflow = workflow.node("keep", run="record", after="gain").node("gain", run="advantage", after="reward")
    models = {role: {"path": write_model(tmp_path / role)} for role in ("first", "second")}
    vllm = {"engine": "vllm", "external": {"python": "/opt/vllm/bin/python"}}
    plan = plan_of(workflow, models=models, roles={"second": {"rollout": vllm}})
    assert {instance.role: instance.engine for instance in plan.instances} == {"first": "native", "second": "vllm"}
    phases = plan.memory.cpu.phases
    assert "engine's weights" in phases["second generates"]
    assert "engine's weights" not in phases["first generates"]
    with pytest.raises(RecipeError, match=r"roles\.second\.rollout\.engine.*unknown engine 'nativ'"):
        plan_of(workflow, models=models, roles={"second": {"rollout": {"engine": "nativ"}}})
