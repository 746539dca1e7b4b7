"""Repeated nodes in workflows and plans, and their surplus groups."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.recipes import make_recipe, only_problem, plan_of

from leaderless.config import RecipeError
from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.data.buffer.row_agreement import Surplus
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.metrics import Metrics
from leaderless.planner import Layout, Repeat, Reshard, RunNode, flat
from leaderless.planner.show.picture import draw_plan
from leaderless.planner.show.text import print_plan
from leaderless.planner.workflow import (
    BUILTIN_STAGES,
    StageSpec,
    Workflow,
    read_workflow,
    resolve_workflow,
    write_workflow,
)
from leaderless.stages.advantage import dynamic_sampling
from leaderless.worker.checkpoint.channel_rows import load_rows, save_rows

DAPO = (
    Workflow("dapo", algorithm={"policy_loss": {"clip_low": 0.2, "clip_high": 0.28}, "aggregation": "token_mean"})
    .node("rollout", run="rollout", role="policy")
    .node("reward", run="reward", after="rollout")
    .node("keep", run="dynamic_sampling", after="reward")
    .node("old", run="log_probs", role="policy", after="keep")
    .node("reference", run="log_probs", role="reference", after="keep")
    .node("advantage", run="advantage", after=["keep", "old", "reference"])
    .node("samples", run="record", after="advantage")
    .node("policy", run="update", role="policy", after=["advantage", "old", "reference"])
    .repeat("rollout", "reward", "keep")
)
POOLS = {"layout": {"rollout": {"ranks": "0-1"}, "reward": {"ranks": 2}, "policy": {"ranks": "3"}}}


def refused(workflow: Workflow, **sections: object):
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow, **sections)
    return only_problem(caught.value)


def without(name: str) -> Workflow:
    return replace(DAPO, nodes=tuple(node for node in DAPO.nodes if node.name != name))


def moved(name: str, after: str) -> Workflow:
    return replace(DAPO, nodes=tuple(replace(n, after=(after,)) if n.name == name else n for n in DAPO.nodes))


# Syntax


def test_yaml_and_builder_give_equal_repetitions(tmp_path):
    assert resolve_workflow("dapo") == DAPO
    path = tmp_path / "w.yaml"
    path.write_text(write_workflow(DAPO))
    assert read_workflow(path) == DAPO


def test_a_workflow_takes_over_the_repeated_nodes_of_its_base_or_has_its_own(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text("name: w\nbase: dapo\n")
    assert read_workflow(path).repeated == DAPO.repeated
    path.write_text("name: w\nbase: dapo\nrepeat: []\n")
    assert read_workflow(path).repeated == ()


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("repeat: keep\n", 3, "repeat", "must be given: a list of nodes"),
        ("repeat: [rollout, reward, kep]\n", 3, "repeat", "no node is called 'kep' (did you mean 'keep'?)"),
        ("repeat: [rollout, reward, reward, keep]\n", 3, "repeat", "node 'reward' is named twice"),
        ("repeat: [reward, keep]\n", 3, "repeat", "its first node 'reward' must begin with the data"),
        (
            "repeat: [rollout, keep]\n",
            None,
            "nodes.reward.after",
            "node 'reward' is not repeated as (rollout, keep) are",
        ),
        (
            "repeat: [rollout, keep, reward]\n",
            3,
            "repeat",
            "is 'reward', so node 'keep' must come before",
        ),
        ("nodes:\n  old: {run: log_probs, role: policy, after: rollout}\n", 4, "nodes.old.after", "add 'keep', or put"),
    ],
)
def test_repeated_nodes_with_another_way_in_or_out_are_refused_with_its_line(tmp_path, text, line, key, message):
    path = tmp_path / "w.yaml"
    path.write_text("name: w\nbase: dapo\n" + text)
    with pytest.raises(RecipeError) as caught:
        read_workflow(path)
    problem = next(problem for problem in caught.value.problems if problem.key == key)
    assert message in problem.message
    assert problem.place == (f"{path}:{line}" if line else str(path))


# What the planner refuses


@pytest.mark.parametrize(
    ("stage", "rows", "whole"), [("reward", "same", True), ("cut", "filter", False), ("join", "regroup", True)]
)
def test_repeated_nodes_must_end_in_a_filter_of_whole_groups(monkeypatch, stage, rows, whole):
    monkeypatch.setitem(
        BUILTIN_STAGES, stage, StageSpec("x:y", ("rewards",), ("rewards",), rows=rows, needs_whole_groups=whole)
    )
    nodes = tuple(replace(node, run=stage) if node.name == "keep" else node for node in DAPO.nodes)
    problem = refused(replace(DAPO, nodes=nodes))
    assert problem.key == "nodes.keep.run"
    assert (
        f"stage '{stage}' ends what is repeated, so it must keep some of its groups and drop the others"
        in problem.message
    )


def test_no_role_is_trained_within_repeated_nodes():
    everything = [node.name for node in DAPO.nodes if node.name not in {"keep", "samples"}]
    workflow = DAPO.node("end", run="dynamic_sampling", after=["policy", "samples"])
    workflow = workflow.repeat(everything[0], "keep", *everything[1:], "samples", "end")
    problem = refused(workflow)
    assert problem.key == "repeat"
    assert "node 'policy' trains a role, and the samples of all rounds must come from the same weights" in (
        problem.message
    )


def test_repeated_nodes_that_fill_no_step_are_refused():
    nodes = tuple(node for node in DAPO.nodes if node.name in DAPO.repeated)
    assert "no node that runs comes after 'keep'" in refused(replace(DAPO, nodes=nodes)).message


def test_settings_of_repetition_where_nothing_is_repeated_are_refused():
    problem = refused(resolve_workflow("grpo"), algorithm={"repeat": {"max_rounds": 3}})
    assert (problem.key, problem.message) == ("algorithm.repeat", "does nothing: the workflow 'grpo' repeats no nodes")


def test_a_response_alone_has_no_signal():
    assert "node 'keep' keeps groups whose rewards differ" in refused(DAPO, batch={"responses_per_prompt": 1}).message


def test_carried_samples_need_the_log_probs_of_the_weights_that_are_trained():
    assert [node.name for node in plan_of("dapo").nodes if node.name == "old"]
    assert not [node.name for node in plan_of("grpo").nodes if node.name == "old"]
    workflow = without("old")
    nodes = tuple(replace(n, after=tuple(a for a in n.after if a != "old")) for n in workflow.nodes)
    assert "reads column 'old_log_probs', which no node before it writes" in (
        refused(replace(workflow, nodes=nodes)).message
    )


# The plan


def test_the_schedule_has_repeated_nodes_in_one_entry():
    plan = plan_of("dapo", batch={"prompts_per_step": 12}, algorithm={"repeat": {"max_rounds": 3}})
    assert [str(action) for action in plan.schedule] == [
        "repeat(load -> rollout -> reward -> keep)",
        "old",
        "advantage",
        "samples",
        "policy",
    ]
    repeat = plan.repeat
    assert repeat is not None
    assert (repeat.nodes, repeat.num_groups, repeat.max_rounds, repeat.last) == (DAPO.repeated, 12, 3, "keep")
    assert plan_of("grpo").repeat is None


def test_each_rank_repeats_its_part_and_what_leaves_the_rounds_travels_once():
    plan = plan_of("dapo", 4, **POOLS)
    chains = {rank: [str(action) for action in plan.chain(rank)] for rank in range(4)}
    assert chains[0][0] == "repeat(load -> rollout -> reshard(rollout->2))"
    assert chains[2][:2] == ["repeat(reshard(rollout->2) -> reward -> keep)", "reshard(keep->3)"]
    assert not any("repeat" in action for action in chains[3]), "a rank without repeated nodes waits for no round"
    assert plan.repeat.ranks == (0, 1, 2)
    assert plan.repeat.layout.ranks == (2,)
    inside = {action.node for action in flat(plan.repeat.body) if isinstance(action, RunNode)}
    assert inside == set(DAPO.repeated)
    assert all(action.source in DAPO.repeated[:-1] for action in plan.repeat.body if isinstance(action, Reshard))
    assert plan.chains()[(2,)] == plan.chain(2)


def test_rows_behind_repeated_nodes_may_be_one_step_old():
    plan = plan_of("dapo", batch={"updates_per_step": 3})
    staleness = {node.name: node.max_staleness for node in plan.nodes}
    assert staleness == dict.fromkeys(DAPO.repeated, 0) | dict.fromkeys(("old", "advantage", "samples", "policy"), 3)
    assert {node.max_staleness for node in plan_of("grpo").nodes} == {0}


def test_surplus_is_a_channel_from_a_loop_to_itself():
    (channel,) = plan_of("dapo", batch={"updates_per_step": 3}).channels
    assert (channel.name, channel.kind, channel.source, channel.target) == (
        "rollout->rollout",
        "rows",
        *["rollout"] * 2,
    )
    assert (channel.capacity, channel.max_staleness, channel.transfers) == (1, 3, ())
    assert plan_of("grpo").channels == ()


def test_ranks_must_agree_on_what_is_repeated():
    plan = plan_of("dapo")
    (repeat,) = [action for action in plan.schedule if isinstance(action, Repeat)]
    others = [
        replace(repeat, max_rounds=repeat.max_rounds + 1),
        replace(repeat, num_groups=repeat.num_groups + 1),
        replace(repeat, body=repeat.body[1:]),
    ]
    schedules = [*((other, *plan.schedule[1:]) for other in others), (*repeat.body, *plan.schedule[1:])]
    hashes = {replace(plan, loops=(replace(plan.loops[0], schedule=schedule),)).hash() for schedule in schedules}
    older = replace(plan, nodes=tuple(replace(node, max_staleness=9) for node in plan.nodes))
    assert len({plan.hash(), older.hash(), *hashes}) == 6


def test_a_reader_sees_what_is_repeated():
    plan = plan_of("dapo", 4, **POOLS)
    read = json.loads(json.dumps(plan.to_json()))
    assert read["repeat"] == {"nodes": list(DAPO.repeated), "ranks": "0-2", "groups": 128, "max_rounds": 8}
    assert read["chains"]["2"][0] == str(plan.chain(2)[0])
    assert json.loads(json.dumps(plan_of("grpo").to_json()))["repeat"] is None
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=120))
    text = " ".join(file.getvalue().split())
    assert "until 128 groups have come out of keep" in text
    assert "at most 8 rounds of 128 prompts a step" in text
    assert "left over at most 127 groups, for the next step" in text
    assert "repeat(load -> rollout -> reshard(rollout->2)) -> weights" in text


@pytest.mark.parametrize("sections", [{}, {"algorithm": {"kl": {"coefficient": 0.1}}}, POOLS])
def test_the_frame_in_the_picture_is_around_repeated_nodes_and_nothing_else(sections):
    world_size = 4 if "layout" in sections else 1
    svg = ET.fromstring(draw_plan(plan_of("dapo", world_size, **sections)))
    parts = [part for part in svg.iter() if "class" in part.attrib]
    frames = [part for part in parts if part.get("class") == "repeat"]
    assert [frame.find("{*}title") is not None for frame in frames] == [True, False], "the frame, and the legend"

    def edges(part):
        rect = part.find("{*}rect")
        x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        return x, y, x + width, y + height

    frame = edges(frames[0])
    for box in [part for part in parts if part.get("class", "").startswith("box")]:
        if box.find("{*}text") is None:
            continue  # a color of the legend
        x1, y1, x2, y2 = edges(box)
        is_inside = frame[0] < x1 and frame[1] < y1 and x2 < frame[2] and y2 < frame[3]
        is_outside = x2 < frame[0] or x1 > frame[2] or y2 < frame[1] or y1 > frame[3]
        assert is_inside == (box.find("{*}text").text in DAPO.repeated)
        assert is_inside != is_outside


# Selection of groups


def test_groups_with_a_signal_are_kept_and_the_others_counted():
    layout = Layout((0,), 1)
    rewards = {5: [1, 1, 1], 6: [0, 1, 0], 7: [0, 0, 0], 8: [1, 1, 1], 9: [-1, 1, 1], 10: [0, 1, 0]}
    valid = {8: [True, False, False], 9: [False, True, True]}
    batch = samples_of(list(rewards)).with_columns(
        rewards=torch.tensor([float("nan") if v < 0 else float(v) for group in rewards.values() for v in group]),
        reward_valid=torch.tensor([v for group in rewards for v in valid.get(group, [True] * 3)]),
    )
    for rows, kept, counts in [
        (batch, [6, 10], {"kept": 2, "dropped_all_right": 2, "dropped_all_wrong": 1, "dropped_failed": 1}),
        (batch.select(torch.empty(0, dtype=torch.int64)), [], {"kept": 0}),
    ]:
        metrics = Metrics()
        context = SimpleNamespace(
            metrics=metrics, node=SimpleNamespace(layout=layout), process_group=ProcessGroup((0,), 0)
        )
        result = dynamic_sampling(rows, context)
        assert result.group_ids.unique().tolist() == result.prompts.ids.tolist() == kept
        assert len(result) == 3 * len(kept)
        numbers = metrics.reduce(ProcessGroup((0,), 0))
        assert all(numbers[f"sampling/{name}"] == count for name, count in counts.items())


# Surplus


def samples_of(groups: list[int], siblings: int = 3) -> Batch:
    """Samples whose columns, of every kind, determine their id."""
    groups = sorted(groups)
    index = torch.arange(len(groups)).repeat_interleave(siblings)
    ids = make_sample_ids(torch.tensor(groups, dtype=torch.int64)[index], torch.arange(siblings).repeat(len(groups)))
    columns = {
        "score": ids.float() / 7,
        "tokens": Jagged.from_lists([[row] * (row % 3) for row in ids.tolist()], torch.int64, "tokens"),
        "note": tuple({"id": row, "text": "\ud800 数"} for row in ids.tolist()),
    }
    prompts = Batch(
        torch.tensor(groups, dtype=torch.int64),
        {
            "prompt_tokens": Jagged.from_lists([[group] for group in groups], torch.int64, "prompt_tokens"),
            "rows": tuple({"group": group} for group in groups),
        },
    )
    return Batch(ids, columns, prompts, index)


def described(batch: Batch) -> list[object]:
    tokens = batch.jagged("tokens").to_lists()
    return sorted(
        [
            [row, float(batch.dense("score")[i]), tokens[i], batch.objects("note")[i], batch.objects("rows")[i]]
            for i, row in enumerate(batch.ids.tolist())
        ],
        key=lambda row: row[0],
    )


def test_the_groups_that_come_first_in_the_data_are_taken_first():
    alone = ProcessGroup((0,), 0)
    surplus = Surplus()
    for groups in ([9, 4], [], [7, 2]):
        surplus.add(samples_of(groups))
    assert surplus.num_groups == 4
    assert described(surplus.take(3, alone)) == described(samples_of([2, 4, 7]))
    assert described(surplus.batch) == described(samples_of([9]))
    assert surplus.batch.prompts.ids.tolist() == [9], "the prompts of others are freed"
    assert len(surplus.take(3, alone)) == 3
    assert (surplus.num_groups, len(surplus.take(3, alone))) == (0, 0)


@settings(max_examples=25)
@given(
    shards=st.lists(st.sets(st.integers(0, 200), max_size=4), min_size=1, max_size=4),
    num_shards=st.integers(1, 5),
)
def test_what_is_left_over_is_read_back_on_any_number_of_shards(tmp_path_factory, shards, num_shards):
    shards = [sorted(group * 4 + number for group in groups) for number, groups in enumerate(shards)]
    folder = tmp_path_factory.mktemp("surplus")
    for number, groups in enumerate(shards):
        save_rows(samples_of(groups), folder, "surplus", number, len(shards))
    read = [load_rows(folder, "surplus", number, num_shards) for number in range(num_shards)]
    if num_shards == len(shards):
        assert [described(part) for part in read] == [described(samples_of(groups)) for groups in shards]
        return
    everything = samples_of([group for groups in shards for group in groups])
    assert [row for part in read for row in described(part)] == described(everything)
    counts = [len(part.group_ids.unique()) for part in read]
    assert max(counts) - min(counts) <= 1


def test_a_checkpoint_without_rows_gives_none(tmp_path):
    save_rows(samples_of([1]), tmp_path, "rows-000001", 0, 1)
    assert load_rows(tmp_path, "surplus", 0, 2) is None


def test_settings_of_the_workflow_hold_unless_the_recipe_has_its_own(tmp_path):
    from leaderless.planner.workflow import load_recipe

    path = tmp_path / "recipe.yaml"
    settings = make_recipe(workflow="dapo").model_dump(mode="json", exclude_none=True, include={"name", "models"})
    path.write_text(json.dumps(settings | {"workflow": "dapo", "data": {"train": {"path": "x.jsonl"}}, "steps": 1}))
    algorithm = load_recipe(path).recipe.algorithm
    assert (algorithm.policy_loss.clip_low, algorithm.policy_loss.clip_high) == (0.2, 0.28)
    assert (algorithm.aggregation, algorithm.uses_reference) == ("token_mean", False)
    assert load_recipe(path, ["algorithm.repeat.max_rounds=2"]).recipe.algorithm.repeat.max_rounds == 2


def test_rows_of_a_version_with_other_columns_are_refused(tmp_path):
    rows = samples_of([1, 2])
    old = rows.with_columns(policy_versions=torch.zeros(len(rows), dtype=torch.int64))
    save_rows(old, tmp_path, "surplus", 0, 1)
    with pytest.raises(RuntimeError, match="'policy_versions' is dense there, but jagged in this version"):
        load_rows(tmp_path, "surplus", 0, 1)
