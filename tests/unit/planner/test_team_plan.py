"""Plans of teams: which node scores the tokens of which role."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.environments.test_play_on import TEAM, refusal
from tests.unit.recipes import plan_of

from leaderless.planner import Plan
from leaderless.planner.workflow import Workflow, resolve_workflow


def test_the_roles_of_a_team_are_compared_with_their_own_references() -> None:
    def planned(workflow: Workflow | str, place: str, coefficient: float = 0.1) -> Plan:
        kl = {"kl": {"coefficient": coefficient, "place": place}}
        team = TEAM | {"algorithm": {"advantage": {"type": "magrpo" if workflow == "dr_mas" else "chained_gae"}, **kl}}
        models = dict.fromkeys(("planner", "solver", *["critic"] * (workflow != "dr_mas")), "/no/model")
        return plan_of(workflow, **team | {"models": models})

    scored = {"planner_before", "solver_before", "planner_reference", "solver_reference"}
    for name in ("marft", "happo", "dr_mas"):
        assert scored & {*planned(name, "loss", 0.0).pruned} == scored
        plan = planned(name, "reward")
        assert not scored & {*plan.pruned}
        assert plan["advantage"].reads["ref_log_probs"] == "solver_reference"
        assert plan["solver_reference"].reads["ref_log_probs"] == "planner_reference"
        assert scored - {*planned(name, "loss").pruned} == {"planner_reference", "solver_reference"}
        roles = {one.role: one.is_trained for one in plan.instances}
        assert not roles["planner_reference"]
        assert roles["planner"]


def test_a_token_that_nobody_scores_is_not_compared_with_a_reference() -> None:
    workflow = resolve_workflow("marft")
    others = tuple(node for node in workflow.nodes if node.name != "solver_reference")
    alone = replace(
        workflow,
        nodes=tuple(
            replace(n, after=("reward", "values", "planner_reference")) if n.name == "advantage" else n for n in others
        ),
    )
    kl = {"advantage": {"type": "chained_gae"}, "kl": {"coefficient": 0.1}}
    problem = refusal(alone, **TEAM | {"algorithm": kl})
    assert "node 'solver' reads 'ref_log_probs' of tokens that role 'solver' has sampled, which no node" in problem
    assert "{run: own_log_probs, role: solver_reference}" in problem
    strange = tuple(replace(n, role="reference") if n.name == "planner_reference" else n for n in workflow.nodes)
    problem = refusal(replace(workflow, nodes=strange), **TEAM | {"algorithm": kl})
    assert "nodes.planner_reference.role: 'reference' has sampled none of the rows" in problem


def test_a_role_is_updated_against_its_own_scores_among_those_of_a_team() -> None:
    """Several updates in a step need old log-probabilities: those of the own role, wherever they are written."""
    workflow = resolve_workflow("marft")
    nodes = tuple(
        replace(n, after=("advantage",), where=(("agent", (n.name,)),)) if n.name in {"planner", "solver"} else n
        for n in workflow.nodes
        if not n.name.endswith("_old")
    )
    plan = plan_of(replace(workflow, nodes=nodes), **TEAM, batch={"updates_per_step": 2})
    assert plan["planner"].reads["old_log_probs"] == "only_planner"
    assert plan["only_planner"].reads["old_log_probs"] == "solver_before"


def test_the_chain_takes_the_value_of_each_token_from_the_critic_of_its_role() -> None:
    models = dict.fromkeys(("planner", "solver"), "/no/model")
    plan = plan_of("marft_critics", **TEAM | {"models": models})
    critics = {one.role for one in plan.instances if one.is_critic}
    assert critics == {"planner_critic", "solver_critic"}
    values = {plan[name].reads["values"] for name in ("joined_only_planner", "joined")}
    assert values == {"planner_values", "solver_values"}
    for role in ("planner", "solver"):
        assert plan[plan[f"{role}_critic"].row_set].node.where == (("agent", (role,)),)
        assert plan[f"{role}_values"].node.agents == (role,)


def test_advantages_of_a_team_are_not_computed_with_the_settings_of_one_role() -> None:
    for own, key in (
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, "kl"),
        ({"advantage": {"type": "rae"}}, "advantage"),
    ):
        problem = refusal("marft", **TEAM | {"roles": {"planner": {"algorithm": own}}})
        assert f"roles.planner.algorithm.{key}: does nothing: no node computes advantages" in problem
    plan_of("marft", **TEAM, roles={"planner": {"algorithm": {"kl": {"coefficient": 0.1}}}})
    plan_of("grpo", roles={"policy": {"algorithm": {"advantage": {"type": "rloo"}}}})
