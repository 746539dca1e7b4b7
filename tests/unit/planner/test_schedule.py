from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.recipes import begin, end, make_recipe, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.planner import (
    Cluster,
    Layout,
    Load,
    Plan,
    PlannedNode,
    Reshard,
    RunNode,
    SyncWeights,
    format_ranks,
    make_plan,
)
from leaderless.planner.entries import QUADRATIC_TOKENS
from leaderless.planner.workflow import BUILTIN_STAGES, DATA_COLUMNS, StageSpec, Workflow, resolve_workflow

KL = {"algorithm": {"kl": {"coefficient": 0.1}}}
SFT = {"data": {"train": {"path": "rows.jsonl", "response": "answer"}}}
TWO_POOLS = {"layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}}
STAGES = "tests.unit.recipes:"


@pytest.fixture
def stages(monkeypatch):
    """Adds stages that read and write what a test needs."""

    def add(name, reads=(), writes=(), **contract):
        monkeypatch.setitem(BUILTIN_STAGES, name, StageSpec("x:y", reads=reads, writes=writes, **contract))

    return add


# The schedule


def test_the_schedule_of_one_pool_is_its_nodes_in_order():
    plan = plan_of("grpo")
    assert [str(action) for action in plan.schedule] == ["load", "rollout", "reward", "advantage", "samples", "policy"]
    assert plan.schedule[0] == Load(Layout((0,), 1), ("prompt_tokens", "rows"))


@pytest.mark.parametrize(("world_size", "sections"), [(1, {}), (4, TWO_POOLS)])
def test_a_plan_without_channels_is_one_loop_of_all_nodes_and_ranks(world_size, sections):
    plan = plan_of("grpo", world_size, **sections)
    (loop,) = plan.loops
    assert (loop.name, loop.nodes) == ("rollout", tuple(node.name for node in plan.nodes))
    assert (loop.ranks, loop.schedule, loop.lag) == (tuple(range(world_size)), plan.schedule, 0)
    assert {plan.loop_of(rank).name for rank in range(world_size)} == {"rollout"}
    read = json.loads(json.dumps(plan.to_json()))
    assert [read_loop["name"] for read_loop in read["loops"]] == ["rollout"]
    assert read["channels"] == []


def test_disjoint_pools_exchange_columns_and_weights():
    plan = plan_of("grpo", 4, **TWO_POOLS)
    first, second = Layout((0, 1), 2), Layout((2, 3), 2)
    (moved,) = [action for action in plan.schedule if isinstance(action, Reshard) and action.source == "rollout"]
    assert (moved.source_layout, moved.target_layout, moved.row_set) == (first, second, "rollout")
    sampled = ("policy_versions", "prompt_tokens", "response_mask", "rollout_log_probs", "temperatures", "tokens")
    assert moved.columns == sampled
    assert plan.schedule[-1] == SyncWeights("policy", second, first)
    assert [(x.role, x.layout, x.is_trained, x.generates, x.scores) for x in plan.instances] == [
        ("policy", first, False, True, False),
        ("policy", second, True, False, False),
    ]
    assert set(plan.chains()) == {(0, 1), (2, 3)}
    assert RunNode("rollout") not in plan.chain(2)
    assert moved in plan.chain(2)


def test_groups_stay_whole_where_a_node_needs_that(stages):
    def moved(layout, workflow=None):
        plan = plan_of(workflow or "grpo", 4, layout={"rollout": {"ranks": "0-1"}} | layout)
        moves = [action for action in plan.schedule if isinstance(action, Reshard)]
        return {f"{move.row_set} to {format_ranks(move.target_layout.ranks)}": move.keep_groups for move in moves}

    assert moved({"policy": {"ranks": "2-3"}}) == {"rollout to 2-3": False}
    assert moved({"policy": {"ranks": "2-3", "groups": "whole"}}) == {"rollout to 2-3": True}
    assert moved({"policy": {"ranks": "2-3"}, "advantage": {"ranks": "2-3"}}) == {"rollout to 2-3": True}
    # A filter in between neither splits groups nor joins them again.
    stages("keep", ["rewards"], rows="filter")
    workflow = end(begin().node("keep", run="keep", after="reward"), "keep")
    train, keep = {"policy": {"ranks": "2-3"}}, {"keep": {"ranks": "2-3"}}
    assert moved(train | keep | {"advantage": {"ranks": "2-3"}}, workflow) == {"rollout to 2-3": True}
    assert moved(train | {"advantage": {"ranks": "2-3"}}, workflow) == {"keep to 2-3": True}
    moves = moved(train | keep | {"advantage": {"ranks": "0-1"}}, workflow)
    assert moves == {"rollout to 2-3": False, "keep to 0-1": True, "keep to 2-3": False}


def test_rows_come_to_a_node_that_reads_no_column():
    workflow = begin().node("noise", run=STAGES + "noise", after="rollout")
    workflow = end(workflow.node("mix", run=STAGES + "noise_reward", after=["reward", "noise"]), "mix")
    plan = plan_of(workflow, 3, layout={"rollout": {"ranks": "0-1"}, "noise": {"ranks": 2}})
    position = {str(action): index for index, action in enumerate(plan.schedule)}
    assert position["rollout"] < position["reshard(rollout->2)"] < position["noise"] < position["reshard(noise->0-1)"]
    moved = next(action for action in plan.schedule if str(action) == "reshard(rollout->2)")
    assert moved.columns == ()


def test_every_layout_that_works_on_prompts_loads_them(stages):
    stages("length", ["prompt_tokens"], ["lengths"])
    stages("use", ["lengths", "tokens"], has_effect=True)
    workflow = Workflow("w").node("length", run="length").node("rollout", run="rollout", role="policy", after="length")
    plan = plan_of(
        workflow.node("use", run="use", after="rollout"),
        4,
        layout={"length": {"ranks": 0}, "rollout": {"ranks": "1-3"}},
    )
    loads = [action for action in plan.schedule if isinstance(action, Load)]
    assert {load.layout.ranks: load.columns for load in loads} == {
        (0,): ("prompt_tokens",),
        (1, 2, 3): ("prompt_tokens",),
    }
    assert plan.batch.max_prompts_per_rank == 128


def test_batch_sizes_follow_from_the_recipe():
    batch = plan_of("grpo", 3, batch={"prompts_per_step": 10, "responses_per_prompt": 4, "updates_per_step": 3}).batch
    assert (batch.prompts_per_step, batch.samples_per_step) == (10, 40)
    assert (batch.prompts_per_update, batch.samples_per_update) == (4, 16)
    assert (batch.max_prompts_per_rank, batch.optimizer_steps) == (4, 9)
    assert plan_of("sft", **SFT).batch.samples_per_step == 128


def test_a_plan_is_json():
    plan = plan_of("grpo", 4, **TWO_POOLS)
    read = json.loads(json.dumps(plan.to_json()))
    assert read["hash"] == plan.hash()
    assert read["chains"]["2-3"] == [str(action) for action in plan.chain(2)]
    assert read["memory_bytes"] is None


# One plan for all ranks


def test_the_same_plan_is_made_again():
    first, second = plan_of("grpo", 4, **TWO_POOLS), plan_of("grpo", 4, **TWO_POOLS)
    assert first == second
    assert first.hash() == second.hash()


def test_the_hash_changes_with_everything_that_ranks_must_agree_on(stages):
    base = plan_of("grpo", 4).hash()
    others = [
        plan_of("grpo", 2),
        plan_of("grpo", 4, optimizer={"learning_rate": 1e-5}),
        plan_of("grpo", 4, seed=1),
        plan_of("grpo", 4, **KL),
        plan_of("grpo", 4, **TWO_POOLS),
        plan_of(resolve_workflow("grpo").node("again", run="record", after="samples"), 4),
    ]
    assert len({base, *(plan.hash() for plan in others)}) == 1 + len(others)
    # The contract of a custom stage is not in the recipe, but determines where rows go.
    hashes = set()
    for needs_whole_groups in (False, True):
        stages("own", ["rewards"], has_effect=True, needs_whole_groups=needs_whole_groups)
        workflow = end(begin(), "reward").node("own", run="own", after="reward")
        hashes.add(plan_of(workflow, 4, layout={"rollout": {"ranks": "0-1"}, "own": {"ranks": "2-3"}}).hash())
    assert len(hashes) == 2


HASH = """
import sys
sys.path[:0] = {path!r}
from tests.unit.recipes import plan_of
layout = {{"rollout": {{"ranks": "0-1"}}, "policy": {{"ranks": "2-3"}}}}
print(plan_of("grpo", 4, algorithm={{"kl": {{"coefficient": 0.1}}}}, layout=layout).hash())
import leaderless.algorithms, leaderless.config, leaderless.planner.workflow, leaderless.planner.show.text
print(sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
import leaderless.planner.show.picture
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""


def test_another_process_makes_the_same_plan_and_needs_no_torch():
    program = HASH.format(path=sys.path)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    output = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert output[0] == plan_of("grpo", 4, **KL, **TWO_POOLS).hash()
    assert output[1:3] == ["[]", "[]"]


def test_a_thousand_ranks_are_planned_fast(tmp_path):
    models = {"policy": write_model(tmp_path / "m")}
    layout = {"rollout": {"ranks": "0-511"}, "policy": {"ranks": "512-1023"}}
    start = time.perf_counter()
    plan = make_plan(
        make_recipe(models=models, layout=layout, batch={"prompts_per_step": 1024}, **KL),
        resolve_workflow("grpo"),
        Cluster(1024),
    )
    plan.hash()
    plan.chains()
    plan.to_json()
    assert time.perf_counter() - start < 60, "2 s on a busy core"


# Any graph on any layouts


@dataclass(frozen=True)
class Case:
    """A workflow with the contracts of its stages, and the layouts of some of its nodes."""

    workflow: Workflow
    specs: Mapping[str, StageSpec]
    layout: Mapping[str, Mapping[str, object]]
    world_size: int

    def plan(self) -> Plan:
        with patch.dict(BUILTIN_STAGES, self.specs):
            return make_plan(make_recipe(models={}, layout=self.layout), self.workflow, Cluster(self.world_size))


@st.composite
def layouts(draw, world_size):
    ranks = draw(st.lists(st.integers(0, world_size - 1), unique=True, min_size=1))
    tp = draw(st.sampled_from([size for size in (1, 2) if len(ranks) % size == 0]))
    return {"ranks": ",".join(map(str, ranks)), "tp": tp}


@st.composite
def cases(draw):
    """Graphs whose nodes read what earlier nodes write, so that most give a plan."""
    world_size = draw(st.integers(1, 5))
    pools = draw(st.lists(layouts(world_size), min_size=1, max_size=3))
    workflow, specs, layout = Workflow("any"), {}, {}
    before: dict[str, set[str]] = {}
    for index in range(draw(st.integers(1, 7))):
        name, names = f"n{index}", sorted(before)
        after = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
        before[name] = set(after).union(*(before[other] for other in after))
        changers = {other for other in names if specs[other].rows != "same"}
        readable = sorted({*DATA_COLUMNS}.union(*(specs[other].writes for other in before[name])))
        shared_writers = {other for other in names if "shared" in specs[other].writes}
        writes = ["shared"] * (shared_writers <= before[name] and draw(st.booleans())) + [f"c{index}"]
        may_change = changers <= before[name] and draw(st.integers(0, 2)) == 0
        specs[name] = StageSpec(
            "x:y",
            reads=tuple(draw(st.lists(st.sampled_from(readable), unique=True, max_size=3))),
            writes=tuple(writes),
            rows=draw(st.sampled_from(["filter", "expand"])) if may_change else "same",
            needs_whole_groups=draw(st.booleans()),
            has_effect=draw(st.booleans()),
        )
        workflow = workflow.node(name, run=name, after=after)
        if draw(st.booleans()):
            layout[name] = draw(st.sampled_from(pools))
    specs["everywhere"] = StageSpec("x:y", has_effect=True)
    layout["everywhere"] = {}
    return Case(workflow.node("everywhere", run="everywhere"), specs, layout, world_size)


def planned(case: Case) -> Plan:
    """The plan of a case; cases that break a contract are skipped."""
    try:
        return case.plan()
    except RecipeError:
        assume(False)
        raise


def rows_of(layout: Layout) -> tuple[object, ...]:
    return layout.ranks, layout.dp


def original_writer(plan: Plan, reader: str, column: str) -> str:
    """The node that wrote what a node reads, before all nodes that passed it on."""
    source = plan[reader].reads[column]
    if source == "data" or column in plan[source].writes:
        return source
    return original_writer(plan, source, column)


class Tables:
    """Which columns of which rows are where: the databuffer without any data."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.columns: dict[object, set[tuple[str, str]]] = {}
        self.has_whole_groups: dict[object, bool] = {}

    def execute(self, action: object) -> None:
        match action:
            case Load():
                key = "data", rows_of(action.layout)
                assert key not in self.columns
                self.columns[key] = {("data", column) for column in action.columns}
                self.has_whole_groups[key] = True
            case RunNode(name):
                self.run(self.plan[name])
            case Reshard():
                self.move(action)

    def run(self, node: PlannedNode) -> None:
        key = node.row_set, rows_of(node.layout)
        assert {(source, column) for column, source in node.reads.items()} <= self.columns[key]
        assert self.has_whole_groups[key] or not node.spec.needs_whole_groups
        if node.spec.rows == "same":
            self.columns[key] |= {(node.name, column) for column in node.writes}
        else:
            made = node.name, rows_of(node.layout)
            self.columns[made] = {(node.name, column) for column in {*node.reads, *node.writes}}
            self.has_whole_groups[made] = node.spec.rows == "expand" or self.has_whole_groups[key]

    def move(self, action: Reshard) -> None:
        source = action.row_set, rows_of(action.source_layout)
        target = action.row_set, rows_of(action.target_layout)
        moved = {(action.source, column) for column in action.columns}
        assert source != target
        assert moved <= self.columns[source]
        assert not moved & self.columns.get(target, set()), "a column travels twice"
        self.has_whole_groups.setdefault(target, action.keep_groups)
        self.columns.setdefault(target, set()).update(moved)


@given(case=cases())
def test_every_node_finds_its_columns_and_whole_groups_where_it_runs(case):
    plan = planned(case)
    tables = Tables(plan)
    for action in plan.schedule:
        tables.execute(action)


@given(case=cases())
def test_every_node_reads_what_the_last_writer_before_it_wrote(case):
    plan = planned(case)
    ancestors = case.workflow.ancestors()
    for node in plan.nodes:
        assert set(case.specs[node.name].reads) <= set(node.reads)
        for column in node.reads:
            writers = [
                other.name
                for other in case.workflow.order()
                if other.name in ancestors[node.name] and column in case.specs[other.name].writes
            ]
            assert original_writer(plan, node.name, column) == [*["data"][: column in DATA_COLUMNS], *writers][-1]


@given(case=cases())
def test_columns_travel_after_they_are_written_and_before_they_are_read(case):
    plan = planned(case)
    position = {action.node: index for index, action in enumerate(plan.schedule) if isinstance(action, RunNode)}
    for index, action in enumerate(plan.schedule):
        if not isinstance(action, Reshard):
            continue
        assert position[action.source] < index
        readers = [
            node
            for node in plan.nodes
            if rows_of(node.layout) == rows_of(action.target_layout) and node.row_set == action.row_set
        ]
        reads = {column for node in readers for column, source in node.reads.items() if source == action.source}
        assert set(action.columns) == reads
        users = [node for node in readers if action.source in node.reads.values()] or readers
        assert all(index < position[node.name] for node in users)


@given(case=cases())
def test_what_runs_is_what_is_needed(case):
    plan = planned(case)
    assert [node.name for node in plan.nodes] == [
        node.name for node in case.workflow.order() if node.name not in plan.pruned
    ]
    used = {source for node in plan.nodes for source in node.reads.values()} | {node.row_set for node in plan.nodes}
    for node in plan.nodes:
        assert case.specs[node.name].has_effect or node.name in used
    assert not [name for name in plan.pruned if case.specs[name].has_effect]
    assert Counter(action.node for action in plan.schedule if isinstance(action, RunNode)) == Counter(
        node.name for node in plan.nodes
    )


@given(case=cases())
def test_a_chain_is_the_schedule_without_what_other_ranks_do(case):
    plan = planned(case)

    def takes_part(rank: int, action: object) -> bool:
        match action:
            case RunNode(name):
                return rank in plan[name].layout.ranks
            case Load():
                return rank in action.layout.ranks
            case _:
                return rank in action.source_layout.ranks or rank in action.target_layout.ranks

    for rank in range(case.world_size):
        assert plan.chain(rank) == tuple(action for action in plan.schedule if takes_part(rank, action))
    chains = plan.chains()
    assert sorted(rank for ranks in chains for rank in ranks) == list(range(case.world_size))
    assert all(plan.chain(rank) == chain for ranks, chain in chains.items() for rank in ranks)
    assert len(set(chains.values())) == len(chains)


@given(case=cases())
def test_any_plan_is_made_again(case):
    plan = planned(case)
    assert case.plan() == plan
    assert case.plan().hash() == plan.hash()


def test_rows_are_balanced_for_the_model_that_trains_on_them(tmp_path):
    wide = write_model(tmp_path / "wide", head_dim=256)
    models = {"policy": write_model(tmp_path / "policy"), "critic": wide}
    pools = {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}, "critic": {"ranks": "4-5"}}
    settings = {"layout": pools, "algorithm": {"advantage": {"type": "gae"}}}
    plan = plan_of("ppo", 6, models=models, **settings)
    sizes = {role: plan.sizes[role].quadratic_tokens for role in models}
    assert sizes["critic"] < sizes["policy"] / 3
    found = {entry.target_layout.ranks: entry.quadratic_tokens for entry in plan.schedule if isinstance(entry, Reshard)}
    assert found[2, 3] == sizes["policy"]
    assert found[4, 5] == sizes["critic"]
    unknown = plan_of("ppo", 6, models={"policy": "/no/such/model", "critic": wide}, **settings)
    found = {e.target_layout.ranks: e.quadratic_tokens for e in unknown.schedule if isinstance(e, Reshard)}
    assert found[2, 3] == QUADRATIC_TOKENS
    assert found[4, 5] == sizes["critic"]
