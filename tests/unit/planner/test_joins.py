from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.unit.planner.test_schedule import Case, Tables, layouts, planned, rows_of
from tests.unit.recipes import make_recipe, only_problem, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.data.batch import Batch, make_sample_ids
from leaderless.data.buffer.databuffer import RowTable
from leaderless.observability.known_metrics import known_metric
from leaderless.planner import Reshard
from leaderless.planner.graph.column_flow import ColumnFlow
from leaderless.planner.workflow import StageSpec, Workflow, read_workflow, stage, write_workflow

MODELS = {"models": {"a": "/no/such/model", "b": "/no/such/model"}}
UPDATES = {"batch": {"updates_per_step": 2}}


@stage(reads=["tokens"], writes=["quality"])
def judge(batch, context):
    """Write about the rows of one policy alone."""


@stage(reads=["rewards"], rows="filter")
def keep_some(batch, context):
    """Drop rows."""


@stage(reads=["quality"], has_effect=True)
def show(batch, context):
    """Read what only some rows have."""


def two(*, old=True, names="ab"):
    """Two policies that sample responses to the same prompts, graded together."""
    workflow = Workflow("two")
    for role in names:
        workflow = workflow.node(f"rollout_{role}", run="rollout", role=role)
    for role in names if old else "":
        workflow = workflow.node(f"old_{role}", run="log_probs", role=role, after=f"rollout_{role}")
    return workflow.node("reward", run="reward", after=[f"rollout_{role}" for role in names])


def trained(workflow, after="advantage"):
    for role in "ab":
        workflow = workflow.node(role, run="update", role=role, after=after, where={"agent": role})
    return workflow


def joint(**options):
    return trained(two(**options).node("advantage", run="advantage", after="reward"))


def refusal(workflow, world_size=1, **sections):
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow, world_size, **{**MODELS, **sections})
    return only_problem(caught.value)


def test_a_node_after_two_rollouts_gets_the_rows_of_both():
    plan = plan_of(joint(), **MODELS, **UPDATES)
    assert plan["reward"].row_set == plan["advantage"].row_set == "joined"
    first, last = plan["joined_rollout_a"], plan["joined"]
    assert (first.row_set, first.row_set_after) == ("rollout_a", "joined")
    assert (last.row_set, last.row_set_after) == ("rollout_b", "joined")
    assert first.reads.keys() == last.reads.keys() >= {"tokens", "agent", "old_log_probs"}
    assert (first.reads["old_log_probs"], last.reads["old_log_probs"]) == ("old_a", "old_b")
    order = [node.name for node in plan.nodes]
    assert max(map(order.index, ("old_a", "old_b"))) < order.index("joined_rollout_a") < order.index("joined")
    assert plan["reward"].node.agents == ("a", "b")
    assert plan.batch.samples_per_step == 2 * plan_of("grpo").batch.samples_per_step
    assert plan.agents == ("a", "b")


def test_a_node_with_where_works_on_the_rows_it_selects():
    plan = plan_of(joint(), **MODELS, **UPDATES)
    for role in "ab":
        assert plan[role].row_set == f"only_{role}"
        assert (plan[f"only_{role}"].row_set, plan[role].node.agents) == ("joined", (role,))
        assert plan[f"only_{role}"].reads["advantages"] == "advantage"


def test_equal_joins_and_selections_are_made_once():
    workflow = two(old=False).node("advantage", run="advantage", after="reward")
    workflow = workflow.node("again", run="log_probs", role="a", after="reward", where={"agent": "a"})
    workflow = workflow.node("b_again", run="log_probs", role="b", after="reward", where={"agent": "b"})
    workflow = workflow.node("a", run="update", role="a", after=["advantage", "again"], where={"agent": "a"})
    workflow = workflow.node("b", run="update", role="b", after=["advantage", "b_again"], where={"agent": "b"})
    plan = plan_of(workflow, **MODELS, **UPDATES)
    selecting = [node.name for node in plan.nodes if node.spec.rows == "filter"]
    assert selecting == ["only_a", "only_b"]
    assert plan["a"].reads["old_log_probs"] == "again", "which has the rows that the update selects already"
    assert [node.name for node in plan.nodes if node.spec.rows == "join"] == ["joined_rollout_a", "joined"]


def test_selections_of_other_rows_can_be_joined_again():
    workflow = two(old=False)
    for role in "ab":
        workflow = workflow.node(f"gain_{role}", run="advantage", after="reward", where={"agent": role})
        workflow = workflow.node(role, run="update", role=role, after=f"gain_{role}")
    workflow = workflow.node("kept", run="record", after=["gain_a", "gain_b"])
    plan = plan_of(workflow, **MODELS)
    assert (plan["kept"].row_set, plan["kept"].node.agents) == ("joined2", ("a", "b"))


def test_samples_of_several_nodes_have_ids_of_their_own():
    plan = plan_of(joint(), **MODELS)
    assert [plan[f"rollout_{role}"].node.sampler for role in "ab"] == [0, 1]
    most = refusal(joint(), batch={"responses_per_prompt": 40000})
    assert (most.key, "set at most 32767" in most.message) == ("batch.responses_per_prompt", True)


def test_a_workflow_with_where_is_written_and_read_back(tmp_path):
    workflow = joint().node("last", run="record", after="advantage", where={"agent": ["a", "b"], "truncated": False})
    (tmp_path / "two.yaml").write_text(write_workflow(workflow))
    assert read_workflow(tmp_path / "two.yaml") == workflow


@pytest.mark.parametrize(
    ("where", "key", "rule"),
    [
        ("{agent: c}", "nodes.x.where.agent", "no row before node 'x' is sampled by a role 'c' (known: a, b)"),
        ("{quality: 3}", "nodes.x.where.quality", "reads column 'quality', which no node before it writes"),
        ("[agent]", "nodes.x.where", "must be a mapping from columns to values"),
        ("{agent: 0.5}", "nodes.x.where.agent", "must be text, a whole number, true or false"),
        ("{agent: []}", "nodes.x.where.agent", "must name at least one value"),
    ],
)
def test_rows_that_cannot_be_selected_are_refused(tmp_path, where, key, rule):
    text = write_workflow(two(old=False))
    (tmp_path / "two.yaml").write_text(f"{text}  x: {{run: advantage, after: reward, where: {where}}}\n")

    def plan():
        workflow = read_workflow(tmp_path / "two.yaml")
        plan_of(workflow.node("last", run="update", role="a", after="x", where={"agent": "a"}), **MODELS)

    with pytest.raises(RecipeError) as caught:
        plan()
    problem = only_problem(caught.value)
    assert (problem.key, rule in problem.message) == (key, True), problem


def test_rows_that_were_selected_by_another_value_are_refused():
    workflow = two(old=False).node("gain", run="advantage", after="reward", where={"agent": "a"})
    problem = refusal(workflow.node("b", run="update", role="b", after="gain", where={"agent": "b"}))
    assert problem.key == "nodes.b.where.agent"
    assert "no row before node 'b' is sampled by a role 'b'" in problem.message
    workflow = two(old=False).node("gain", run="advantage", after="reward", where={"truncated": False})
    problem = refusal(workflow.node("x", run="record", after="gain", where={"truncated": True}))
    assert (problem.key, "no row is left" in problem.message) == ("nodes.x.where.truncated", True)


def test_rows_that_may_be_the_same_are_not_joined():
    workflow = two(old=False)
    for name in ("one", "other"):
        workflow = workflow.node(name, run="tests.unit.planner.test_joins:keep_some", after="reward")
    problem = refusal(workflow.node("advantage", run="advantage", after=["one", "other"]))
    assert problem.key == "nodes.advantage.after"
    assert "'one' and 'other' both change rows and neither comes after the other" in problem.message


def test_a_column_that_only_some_of_the_joined_rows_have_is_refused():
    workflow = joint(old=False).node("judged", run="tests.unit.planner.test_joins:judge", after="rollout_a")
    problem = refusal(workflow.node("shown", run="tests.unit.planner.test_joins:show", after=["reward", "judged"]))
    assert problem.key == "nodes.shown.after"
    assert "reads 'quality' on joined rows, but only those of 'judged' have it" in problem.message
    assert "about the rows of 'rollout_b' too" in problem.message


def test_a_role_learns_from_its_own_samples_only():
    workflow = two(old=False).node("advantage", run="advantage", after="reward")
    problem = refusal(workflow.node("a", run="update", role="a", after="advantage"))
    assert (problem.key, "where: {agent: a}" in problem.message) == ("nodes.a.after", True)


@pytest.mark.parametrize(
    ("node", "setting"),
    [("reward", {"stop": ["x"]}), ("advantage", {"max_response_tokens": 9})],
)
def test_samples_that_were_generated_otherwise_are_not_scored_together(node, setting):
    overlong = {"algorithm": {"overlong": {"buffer_tokens": 2}}}
    problem = refusal(joint(old=False), roles={"b": {"rollout": setting}}, **overlong)
    (name,) = setting
    assert problem.key == f"roles.b.rollout.{name}"
    assert f"node '{node}' works on samples of both" in problem.message


def test_samples_of_several_temperatures_are_scored_together_as_each_token_has_its_own():
    workflow = joint(old=False).node("scores", run="log_probs", role="a", after="reward")
    plan = plan_of(workflow, **MODELS, roles={"b": {"rollout": {"temperature": 0.5}}})
    assert all("temperatures" in node.reads for node in plan.nodes if node.name == "scores")


def test_log_probs_of_rows_of_several_roles_are_named_by_their_role():
    workflow = joint().node("all_a", run="log_probs", role="a", after="reward")
    flow = ColumnFlow(
        make_recipe(**MODELS, **UPDATES), workflow.node("all_b", run="log_probs", role="b", after="reward")
    )
    assert (flow.writes["all_a"], flow.writes["all_b"]) == (("a_log_probs",), ("b_log_probs",))
    assert flow.writes["old_a"] == flow.writes["old_b"] == ("old_log_probs",)


POOLS = {"a": {"ranks": "0-1"}, "b": {"ranks": "2-3"}}


def test_rows_of_two_pools_are_joined_where_groups_can_be_made_whole():
    plan = plan_of(joint(), 4, **MODELS, layout=POOLS)
    assert plan["advantage"].layout.ranks == (0, 1)
    assert plan["joined"].layout.ranks == plan["joined_rollout_a"].layout.ranks == (2, 3)
    (back,) = (action for action in plan.schedule if isinstance(action, Reshard) and action.source == "joined")
    assert back.keep_groups
    plan = plan_of(joint(), 4, **MODELS, layout={**POOLS, "reward": {"ranks": "2-3"}, "advantage": {"ranks": "0-1"}})
    assert plan["joined"].layout.ranks == (2, 3), "where the reward is computed"
    one = plan_of(joint(), 2, **MODELS, layout={"a": {"ranks": "0"}, "b": {"ranks": "1"}})
    assert one["joined"].layout.ranks == (0,), "one shard has whole groups in any case"


def test_rows_of_elsewhere_are_not_joined_where_groups_must_be_whole():
    layout = {
        "rollout_a": {"ranks": "0-1"},
        "rollout_b": {"ranks": "2-3"},
        "reward": {"ranks": "0-1", "groups": "whole"},
        "advantage": {"ranks": "2-3"},
    }
    problem = refusal(joint(), 4, layout=layout)
    assert (problem.key, "whole groups are needed" in problem.message) == ("layout.reward", True)


def test_layouts_name_only_nodes_that_were_written():
    assert refusal(joint(), 2, layout={"joined": {"ranks": "0"}}).key == "layout.joined"


def test_the_vocabulary_of_metrics_has_those_of_roles():
    assert known_metric("rollout/staleness/solver") == known_metric("rollout/staleness")
    assert known_metric("reward/mean/solver") == known_metric("reward/mean")
    assert known_metric("no/such/metric") is None
    workflow = joint()
    plan_of(workflow, **MODELS, checkpoint={"best_metric": "rollout/staleness/a"})
    problem = refusal(workflow, checkpoint={"best_metric": "rollout/staleness"})
    assert "rollout/staleness/a" in problem.message


def test_memory_and_edges_count_the_samples_of_all_nodes(tmp_path):
    model = write_model(tmp_path / "model")
    plan = plan_of(joint(), models={"a": model, "b": model})
    size = {(edge.source, edge.target): edge.max_bytes for edge in plan.edges}
    (alone,) = [e for e in plan_of("grpo", models={"policy": model}).edges if e.target == "reward"]
    assert size["joined", "reward"] > 1.9 * alone.max_bytes
    assert {"a generates", "b trains"} <= plan.memory.cpu.phases.keys()


def test_a_row_is_in_one_of_the_parts_that_are_joined():
    prompts = Batch(torch.tensor([1, 2]))
    ids = make_sample_ids(prompts.ids, torch.tensor([0, 0]))
    part = Batch(ids, {"x": torch.arange(2)}, prompts, torch.arange(2))
    other = Batch(ids + 1, {"x": torch.arange(2)}, prompts, torch.arange(2))
    joined = RowTable.joined([RowTable.of(part, "n"), RowTable.of(other, "n")])
    assert joined.ids.tolist() == sorted([*ids.tolist(), *(ids + 1).tolist()])
    with pytest.raises(ValueError, match="is in several of the parts"):
        RowTable.joined([RowTable.of(part, "n"), RowTable.of(part, "n")])


class JoinedTables(Tables):
    """Which columns are where, and which table's groups are on which shards: those that were loaded or resharded."""

    def __init__(self, plan):
        super().__init__(plan)
        self.divided_by = {}

    def run(self, node):
        key, made = (node.row_set, rows_of(node.layout)), (node.row_set_after, rows_of(node.layout))
        before = self.columns.get(made), self.has_whole_groups.get(made)
        if node.spec.rows != "join":
            super().run(node)
            self.divided_by.setdefault(made, self.divided_by.get(key, key))
            return
        assert {(source, column) for column, source in node.reads.items()} <= self.columns[key]
        columns, whole = {(node.row_set_after, column) for column in node.reads}, self.has_whole_groups[key]
        if before[0] is not None:
            assert columns == before[0], "all parts have the same columns"
            meets = node.layout.dp == 1 or self.divided_by[made] == self.divided_by.get(key, key)
            whole = whole and before[1] and meets
        self.columns[made], self.has_whole_groups[made] = columns, whole
        self.divided_by[made] = self.divided_by.get(key, key)


RANKS = st.sampled_from(["0", "1", "0-1", "2-3", "0-3", "1-2"])
NODES = ("rollout_a", "rollout_b", "old_a", "old_b", "reward", "advantage", "a", "b")


@given(layout=st.dictionaries(st.sampled_from(NODES), RANKS), is_apart=st.booleans())
@example(layout={"a": "0-1", "b": "2-3"}, is_apart=False)
@example(layout={"rollout_a": "0-1", "rollout_b": "2-3", "reward": "1-2"}, is_apart=False)
def test_joined_rows_and_whole_groups_are_found_on_any_layouts(layout, is_apart):
    workflow = two(old=True)
    if is_apart:
        for role in "ab":
            workflow = workflow.node(f"gain_{role}", run="advantage", after="reward", where={"agent": role})
            workflow = workflow.node(role, run="update", role=role, after=f"gain_{role}")
        workflow = workflow.node("advantage", run="record", after=["gain_a", "gain_b"])
    else:
        workflow = trained(workflow.node("advantage", run="advantage", after="reward"))
    ranks = {name: {"ranks": own} for name, own in layout.items()}
    try:
        plan = plan_of(workflow, 4, **MODELS, **UPDATES, layout=ranks)
    except RecipeError as error:
        message = only_problem(error).message
        assume(not any(part in message for part in ("runs no node", "whole groups are needed")))
        raise
    tables = JoinedTables(plan)
    for action in plan.schedule:
        tables.execute(action)


@st.composite
def graphs(draw) -> Case:
    """Graphs in which nodes work on the rows of several samplers, or select some of these rows."""
    world_size = draw(st.integers(2, 4))
    pools = draw(st.lists(layouts(world_size), min_size=1, max_size=3))
    num_samplers = draw(st.integers(2, 3))
    workflow, specs, layout = Workflow("any"), {}, {}
    for index in range(num_samplers + draw(st.integers(1, 5))):
        name, names, is_sampler = f"n{index}", sorted(specs), index < num_samplers
        after = [] if is_sampler else draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3))
        columns = ["prompt_tokens"] if is_sampler else ["prompt_tokens", "tokens", "score"]
        is_filter = not is_sampler and draw(st.integers(0, 5)) == 0
        specs[name] = StageSpec(
            "x:y",
            reads=tuple(draw(st.lists(st.sampled_from(columns), unique=True, max_size=3))),
            writes=("tokens", "score", "kind") if is_sampler else (f"c{index}",),
            rows="expand" if is_sampler else "filter" if is_filter else "same",
            needs_whole_groups=draw(st.booleans()),
            streams=draw(st.booleans()),
            has_effect=draw(st.booleans()),
        )
        kinds = st.lists(st.integers(0, 2), unique=True, min_size=1, max_size=2)
        where = {} if is_sampler or draw(st.booleans()) else {"kind": draw(kinds)}
        workflow = workflow.node(name, run=name, after=after, where=where)
        if draw(st.integers(0, 2)):
            layout[name] = draw(st.sampled_from(pools))
    specs["everywhere"] = StageSpec("x:y", has_effect=True)
    layout["everywhere"] = {}
    return Case(workflow.node("everywhere", run="everywhere"), specs, layout, world_size)


@given(case=graphs())
def test_drawn_joins_and_selections_find_their_columns_and_whole_groups(case):
    plan = planned(case)
    tables = JoinedTables(plan)
    for action in plan.schedule:
        tables.execute(action)
