from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit import recipes
from tests.unit.recipes import make_recipe, only_problem

from leaderless.config import RecipeError
from leaderless.planner.workflow import (
    BUILTIN_STAGES,
    COLUMNS,
    Node,
    Workflow,
    builtin_workflows,
    log_probs_column,
    read_workflow,
    resolve_workflow,
    spec_of,
    stage,
    write_workflow,
)

GRPO = (
    Workflow("grpo")
    .node("rollout", run="rollout", role="policy")
    .node("reward", run="reward", after="rollout")
    .node("old", run="log_probs", role="policy", after="rollout")
    .node("reference", run="log_probs", role="reference", after="rollout")
    .node("advantage", run="advantage", after=["reward", "old", "reference"])
    .node("samples", run="record", after="advantage")
    .node("policy", run="update", role="policy", after=["advantage", "old", "reference"])
)


def chain(*names: str) -> Workflow:
    workflow = Workflow("chain")
    for name, before in zip(names, [(), *names], strict=False):
        workflow = workflow.node(name, run="reward", after=before)
    return workflow


def refused(function, *args):
    with pytest.raises(RecipeError) as caught:
        function(*args)
    return only_problem(caught.value)


# One object from YAML and Python


def test_yaml_and_builder_give_equal_workflows():
    assert resolve_workflow("grpo") == GRPO
    assert resolve_workflow("sft") == Workflow("sft", algorithm={"aggregation": "token_mean"}).node(
        "policy", run="sft", role="policy"
    )


def test_after_may_be_one_name_or_a_list(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text(
        "name: w\nnodes:\n  a: {run: reward}\n  b: {run: reward, after: a}\n  c: {run: reward, after: [a, b]}\n"
    )
    workflow = read_workflow(path)
    assert workflow["a"] == Node("a", "reward")
    assert workflow["b"].after == ("a",)
    assert workflow["c"].after == ("a", "b")


node_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True) | st.sampled_from(
    ["yes", "null", "on", "a_été"]
)


@st.composite
def workflows(draw):
    names = draw(st.lists(node_names.filter(lambda name: name != "data"), min_size=1, max_size=6, unique=True))
    workflow = Workflow(draw(st.text(max_size=10)))
    for index, name in enumerate(names):
        after = draw(st.lists(st.sampled_from(names[:index]), unique=True)) if index else []
        role = draw(st.none() | node_names)
        workflow = workflow.node(name, run=draw(st.text(max_size=10)), role=role, after=after)
    return Workflow(workflow.name, tuple(draw(st.permutations(workflow.nodes))))


@given(workflow=workflows())
@settings(deadline=None)
def test_a_workflow_that_is_written_out_reads_back_equal(tmp_path_factory, workflow):
    path = tmp_path_factory.getbasetemp() / "workflow.yaml"
    path.write_text(write_workflow(workflow), encoding="utf-8")
    assert read_workflow(path) == workflow


# Order


@given(workflow=workflows())
@settings(deadline=None)
def test_every_node_comes_behind_those_it_is_after(workflow):
    order = [node.name for node in workflow.order()]
    assert sorted(order) == sorted(node.name for node in workflow.nodes)
    for node in workflow.nodes:
        assert all(order.index(before) < order.index(node.name) for before in node.after)
        assert workflow.ancestors()[node.name] >= set(node.after)


def test_nodes_without_an_order_stay_as_written():
    workflow = Workflow("w").node("c", run="x", after="b").node("z", run="x").node("b", run="x").node("a", run="x")
    assert [node.name for node in workflow.order()] == ["z", "b", "c", "a"]


def test_ancestors_are_those_before_at_any_distance():
    assert chain("a", "b", "c").ancestors() == {"a": set(), "b": {"a"}, "c": {"a", "b"}}
    assert GRPO.ancestors()["samples"] == {"rollout", "reward", "old", "reference", "advantage"}


def test_a_cycle_is_refused_with_its_nodes():
    workflow = Workflow("w").node("a", run="x", after="c").node("b", run="x", after="a").node("c", run="x", after="b")
    problem = refused(workflow.order)
    path = problem.message.removeprefix("nodes form a cycle: ").split(" -> ")
    assert len(path) == 4
    assert set(path) == {"a", "b", "c"}
    assert all(second in workflow[first].after for first, second in pairwise(path))
    assert problem.key == f"nodes.{path[0]}.after"


def test_a_node_after_itself_is_refused():
    assert "nodes form a cycle: a -> a" in refused(Workflow("w").node("a", run="x", after="a").order).message


def test_an_unknown_node_is_refused_and_the_nearest_named():
    problem = refused(chain("rollout").node("reward", run="reward", after="rolout").order)
    assert problem.key == "nodes.reward.after"
    assert problem.message == "no node is called 'rolout' (did you mean 'rollout'?)"


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (Workflow("w"), "must hold at least one node"),
        (chain("a").node("a", run="x"), "two nodes have this name"),
        (chain("a b"), "must be a plain word"),
        (chain("1"), "must be a plain word"),
        (chain(""), "must be a plain word"),
        (chain("data"), "`data` names the dataloader"),
    ],
)
def test_names_that_cannot_be_told_apart_or_written_are_refused(workflow, message):
    assert message in refused(workflow.order).message


# Files


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("name: w\nnods: {}\nnodes: {a: {run: x}}\n", 2, "nods", "did you mean 'nodes'?"),
        ("name: w\n5: x\nnodes: {a: {run: x}}\n", 2, "5", "unknown key"),
        ("nodes: {a: {run: x}}\n", None, "name", "must be given: a name"),
        ("name: w\n", None, "nodes", "must be given: the nodes by name"),
        ("name: w\nnodes: [a]\n", 2, "nodes", "must be given: the nodes by name"),
        ("name: w\nnodes:\n  a: rollout\n", 3, "nodes.a", "must be a mapping such as"),
        ("name: w\nnodes:\n  a: {rnu: x, run: y}\n", 3, "nodes.a.rnu", "did you mean 'run'?"),
        ("name: w\nnodes:\n  a: {role: x}\n", 3, "nodes.a.run", "must name a stage"),
        ("name: w\nnodes:\n  a: {run: 3}\n", 3, "nodes.a.run", "must name a stage"),
        ("name: w\nnodes:\n  a: {run: x, role: 3}\n", 3, "nodes.a.role", "must name a role"),
        ("name: w\nnodes:\n  a: {run: x, role: ''}\n", 3, "nodes.a.role", "must name a role"),
        ("name: w\nnodes:\n  a: {run: x}\n  b:\n    run: x\n    after: 0\n", 6, "nodes.b.after", "must name a node"),
        ("name: w\nnodes:\n  a: {run: x, after: [3]}\n", 3, "nodes.a.after", "must name a node"),
        ("name: w\nnodes:\n  yes: {run: x}\n", 3, "nodes.True", "must be text; put it in quotes"),
        ("name: w\nnodes:\n  a: {run: x}\n  a: {run: y}\n", 4, "nodes.a", "is written twice"),
        ("name: w\nnodes:\n  a: {run: x}\n  b: {run: x, after: c}\n", 4, "nodes.b.after", "no node is called 'c'"),
        ("name: w\nnodes: {}\n", 2, "nodes", "must hold at least one node"),
    ],
)
def test_a_file_that_is_no_workflow_is_refused_with_its_line(tmp_path, text, line, key, message):
    path = tmp_path / "w.yaml"
    path.write_text(text)
    problem = refused(read_workflow, path)
    assert (problem.key, problem.place) == (key, f"{path}:{line}" if line else str(path))
    assert message in problem.message


# Names of workflows


def test_a_workflow_is_built_in_or_a_file_or_a_function(tmp_path):
    assert set(builtin_workflows()) >= {"grpo", "sft"}
    path = tmp_path / "mine.yaml"
    path.write_text(write_workflow(GRPO))
    assert resolve_workflow(str(path)) == GRPO
    assert resolve_workflow("tests.unit.recipes:one_node_workflow") == recipes.one_node_workflow()


def test_built_in_workflows_are_called_as_their_files():
    assert all(resolve_workflow(name).name == name for name in builtin_workflows())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grrpo", "unknown workflow 'grrpo' (did you mean 'grpo'?); a file must end in .yaml"),
        ("no/such.yaml", "cannot be read"),
        ("tests.unit.recipes:no_workflow", "returned str, not a Workflow"),
        ("tests.unit.recipes:needs_argument", "must be callable with 0 positional arguments"),
        ("tests.unit.recipes:no_workflw", "did you mean 'no_workflow'?"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_names_no_workflow_is_refused(name, message):
    assert message in refused(resolve_workflow, name).message


# Stages


def test_a_function_declares_its_contract():
    spec = spec_of(Node("penalty", "tests.unit.recipes:length_penalty"))
    recipe, node = make_recipe(), Node("penalty", "x")
    assert spec.reads_of(recipe, node) == ("response_lengths", "rewards")
    assert spec.writes_of(recipe, node, GRPO) == ("rewards",)
    assert spec.implementation == "tests.unit.recipes:length_penalty"
    assert spec.summary == "Reduce the rewards of long responses."
    assert (spec.rows, spec.role_use, spec.is_effective(recipe)) == ("same", "none", False)
    assert spec_of(Node("f", "tests.unit.recipes:keep_informative")).rows == "filter"


def test_a_declared_function_is_still_that_function():
    assert recipes.length_penalty.__name__ == "length_penalty"


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"reads": "rewards"}, "@stage(reads='rewards'): must be a list of columns: write reads=['rewards']"),
        ({"writes": "x"}, "@stage(writes='x'): must be a list of columns: write writes=['x']"),
        ({"writes": ["a", "b", "a"]}, "@stage(writes=['a', 'b', 'a']): names 'a' twice; keep one"),
        ({"reads": [3]}, "@stage(reads=[3]): 3 is no name of a column: use text"),
        ({"metrics": "a/b"}, "@stage(metrics='a/b'): must be a list of metrics: write metrics=['a/b']"),
        ({"metrics": [3]}, "@stage(metrics=[3]): 3 is no name of a metric: use text"),
        ({"reads": [""]}, "@stage(reads=['']): '' is no name of a column: use text"),
        ({"rows": "filters"}, "@stage(rows='filters'): must be one of same, expand, filter, regroup"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused(declaration, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        stage(**declaration)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("rolout", "unknown stage 'rolout' (did you mean 'rollout'?); a custom one is 'package.module:function'"),
        ("module:", "unknown stage 'module:'"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.unit.recipes:lenght_penalty", "has no function 'lenght_penalty' (did you mean 'length_penalty'?)"),
        ("tests.unit.recipes:undecorated", "must be declared with @leaderless.stage(reads=..., writes=...)"),
        ("tests.unit.recipes:one_argument", "one_argument(batch) must be callable with 2 positional arguments"),
        ("builtins:dict", "'builtins:dict' must be a function written in Python"),
        ("tests.unit.recipes:RECIPE", "has no function 'RECIPE'"),
    ],
)
def test_what_is_no_stage_is_refused(run, message):
    problem = refused(spec_of, Node("mine", run))
    assert problem.key == "nodes.mine.run"
    assert message in problem.message


def test_a_module_that_fails_while_it_is_imported_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_stage_module.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    problem = refused(spec_of, Node("mine", "broken_stage_module:f"))
    assert "module 'broken_stage_module' cannot be imported: ZeroDivisionError: division by zero" in problem.message


def test_columns_of_built_in_stages_are_documented():
    recipe = make_recipe(algorithm={"kl": {"coefficient": 0.1}}, batch={"updates_per_step": 2})
    for name, spec in BUILTIN_STAGES.items():
        for role in ("policy", "reference"):
            node = Node("n", name, role)
            workflow = Workflow("w", (node, Node("trainer", "update", "policy")))
            assert {*spec.reads_of(recipe, node), *spec.writes_of(recipe, node, workflow)} <= set(COLUMNS), name


def test_built_in_stages_name_functions_that_exist():
    for name, spec in BUILTIN_STAGES.items():
        for place in (spec.implementation, *spec.implementations.values()):
            module, _, function = place.partition(":")
            found = find_spec(module)
            assert found is not None, name
            assert found.origin is not None
            tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
            assert function in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}, name
        assert spec.summary, name


def test_log_probs_are_named_by_their_owner():
    def column(role, workflow=GRPO, agents=("policy",)):
        return log_probs_column(Node("scores", "log_probs", role, agents=agents), workflow)

    assert column("reference") == "ref_log_probs"
    assert column("policy") == "old_log_probs"
    assert column("policy_reference") == "ref_log_probs"
    assert column("policy_reference", agents=("teacher",)) == "policy_reference_log_probs"
    assert column("policy_critic") == "policy_critic_log_probs"
    assert column("teacher") == "teacher_log_probs"
    assert column("teacher", GRPO.node("more", run="sft", role="teacher")) == "old_log_probs"
    assert column("policy", agents=("policy", "teacher")) == "policy_log_probs"
