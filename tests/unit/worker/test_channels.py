"""Channels in recipes and plans: how they cut a workflow into loops, and which cuts are refused."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from unittest.mock import patch
from xml.etree import ElementTree as ET

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.planner.test_schedule import Tables, rows_of
from tests.unit.recipes import end, make_recipe, only_problem, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.planner import Cluster, Layout, Plan, Pull, Push, Reshard, RunNode, SyncWeights, make_plan
from leaderless.planner.graph.loops import find_circle, lag_of
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.rank import DeviceMemory
from leaderless.planner.show.picture import draw_plan
from leaderless.planner.show.text import print_plan
from leaderless.planner.workflow import BUILTIN_STAGES, Node, StageSpec, Workflow, resolve_workflow

POOLS = {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}
BEHIND = POOLS | {key: {"ranks": "2-3"} for key in ("reward", "advantage")}
THREE = {"rollout": {"ranks": "0"}, "reward": {"ranks": "1"}, "policy": {"ranks": "2-3"}}
GAE = {"advantage": {"type": "gae"}}
KL = {"kl": {"coefficient": 0.1}}


def cut(capacity: int = 1, *, workflow: Workflow | str = "grpo", layout: object = POOLS, **sections: object) -> Plan:
    channels = {"channels": {"rollout": {"capacity": capacity}}} | sections
    return plan_of(workflow, 4, layout=layout, **channels)


def names(plan: Plan) -> list[list[str]]:
    return [[str(action) for action in loop.schedule] for loop in plan.loops]


# The plan


def test_a_capacity_cuts_a_workflow_into_a_loop_that_generates_and_one_that_trains():
    plan = cut(2, batch={"updates_per_step": 3}, algorithm=KL)
    assert names(plan) == [
        [
            "pull(policy=>rollout)",
            *("load", "rollout", "reward", "reference", "advantage"),
            "push(rollout->old)",
            "samples",
        ],
        ["pull(rollout->old)", "old", "policy", "push(policy=>rollout)"],
    ]
    first, second = plan.loops
    assert (first.name, first.ranks, first.lag) == ("rollout", (0, 1), 2)
    assert (second.name, second.nodes, second.ranks, second.lag) == ("old", ("old", "policy"), (2, 3), 0)
    rows, weights = plan.channels
    assert (rows.kind, rows.source, rows.target, rows.capacity, rows.max_staleness) == ("rows", "rollout", "old", 2, 6)
    assert [move.source for move in rows.reshards] == ["rollout", "reward", "reference", "advantage"]
    assert [move.is_late for move in rows.reshards] == [False, True, True, True]
    assert (rows.source_ranks, rows.target_ranks) == ((0, 1), (2, 3))
    assert (weights.kind, weights.source, weights.target, weights.capacity) == ("weights", "old", "rollout", 2)
    assert weights.sync == SyncWeights("policy", Layout((2, 3), 2), Layout((0, 1), 2))
    assert [lag_of(channel, plan.loops) for channel in plan.channels] == [0, 3]
    assert {node.name: node.max_staleness for node in plan.nodes if node.max_staleness} == {"old": 6, "policy": 6}
    assert not any(isinstance(action, Reshard | SyncWeights) for action in plan.schedule), "the channels send them"


def test_each_rank_walks_the_chain_of_its_loop():
    plan = cut()
    assert plan.chain(0) == plan.loops[0].schedule
    assert plan.chain(3) == plan.loops[1].schedule
    assert (plan.loop_of(1).name, plan.loop_of(2).name) == ("rollout", "old")
    assert set(plan.chains()) == {(0, 1), (2, 3)}
    assert plan.ranks_of(Push("policy=>rollout")) == plan.ranks_of(Pull("rollout->old")) == (2, 3)


def test_a_loop_may_have_several_pools():
    plan = cut(layout=THREE)
    rows, _ = plan.channels
    assert names(plan)[0] == ["pull(policy=>rollout)", "load", "rollout", "push(rollout->reward)"]
    assert names(plan)[1][:3] == ["pull(rollout->reward)", "reward", "reshard(reward->2-3)"]
    assert [str(move) for move in rows.reshards] == ["reshard(rollout->1)", "reshard(rollout->2-3)"]


def test_rows_behind_a_channel_are_scored_by_the_weights_that_are_trained():
    assert "old" in [node.name for node in cut().nodes]
    assert "old" not in [node.name for node in plan_of("grpo", 4, layout=POOLS).nodes]


def test_a_critic_trains_behind_the_channel():
    layout = POOLS | {name: {"ranks": "2-3"} for name in ("critic", "advantage")}
    plan = cut(workflow="ppo", layout=layout, algorithm=GAE)
    assert {"values", "critic", "advantage", "old", "policy"} <= set(plan.loops[1].nodes)
    assert [channel.name for channel in plan.channels] == ["rollout->old", "policy=>rollout"]


def test_several_policies_may_generate_and_train_each_on_its_side():
    workflow = Workflow("two").node("a", run="rollout", role="x").node("b", run="rollout", role="y")
    workflow = workflow.node("reward", run="reward", after=["a", "b"])
    workflow = workflow.node("advantage", run="advantage", after="reward")
    for role in "xy":
        own = {"role": role, "where": {"agent": role}}
        workflow = workflow.node(f"old_{role}", run="log_probs", after="reward", **own)
        workflow = workflow.node(f"train_{role}", run="update", after=["advantage", f"old_{role}"], **own)
    layout = {name: {"ranks": "0-1"} for name in "ab"} | {f"train_{role}": {"ranks": "2-3"} for role in "xy"}
    channels = {"a": {"capacity": 1}}
    plan = cut(workflow=workflow, layout=layout, channels=channels, models=dict.fromkeys("xy", "/no/such/model"))
    assert [channel.name for channel in plan.channels] == ["a->old_x", "x=>a", "y=>b"]
    assert names(plan)[0][:2] == ["pull(x=>a)", "pull(y=>b)"]
    assert names(plan)[1][-2:] == ["push(x=>a)", "push(y=>b)"]
    # What joins the rows of two pools goes through iterations with both of them.
    apart = layout | {"b": {"ranks": "2-3"}, "train_y": {"ranks": "2-3"}}
    key, message = refused(workflow, layout=apart, channels=channels, models=dict.fromkeys("xy", "/no/such/model"))
    assert key == "channels.a"
    assert "without a channel, so that" in message


def test_a_bound_on_staleness_may_be_larger_than_what_the_capacity_makes():
    plan = cut(channels={"rollout": {"capacity": 2, "max_staleness": 5}})
    assert {channel.max_staleness for channel in plan.channels} == {5}
    assert plan["policy"].max_staleness == 5


def test_ranks_must_agree_on_channels():
    plans = [cut(1), cut(2), cut(channels={"rollout": {"capacity": 1, "max_staleness": 5}})]
    assert len({plan.hash() for plan in [*plans, plan_of("grpo", 4, layout=POOLS)]}) == 4


@pytest.mark.parametrize("capacity", [1, 3])
def test_what_is_in_flight_is_part_of_the_memory(tmp_path, capacity):
    def memory(part: str, dtype: str, max_sequences: int, **batch: int) -> tuple[Plan, list[int]]:
        model = {"path": write_model(tmp_path / "m"), "compute_dtype": dtype}
        shared = {"models": {"policy": model}, "batch": batch, "rollout": {"max_sequences": max_sequences}}
        assert "in flight" not in str(plan_of("grpo", 4, layout=POOLS, **shared).memory)
        plan = cut(capacity, **shared)
        kinds = (plan.memory.cpu, plan.memory.accelerator)
        return plan, [(kind.resident | kind.host).get(part, 0) for kind in kinds]

    plan, held = memory("rows in flight", "float32", 999, prompts_per_step=128, micro_batch_tokens=2048)
    rows = plan.channel("rollout->old")
    tokens = 128 * 8 // 2 * 1024 * 8  # a rank has half of the samples, 8 for each prompt; a token takes 8 bytes
    assert tokens < rows.max_bytes < 10 * tokens
    assert held == [capacity * rows.max_bytes] * 2
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        few = {"prompts_per_step": 6, "micro_batch_tokens": 16384}  # so that ranks that train hold most
        plan, held = memory("weights in flight", dtype, 1, **few)
        share = plan.sizes["policy"].num_parameters * width // 2
        pinned = 1 << (share - 1).bit_length()  # torch rounds blocks of pinned memory up to powers of two
        assert pinned > share
        assert held == [(capacity - 1) * share, capacity * pinned], "an iteration waits until the oldest copy is gone"


@pytest.mark.parametrize("capacity", [1, 3])
def test_the_copy_of_weights_that_is_sent_is_gone_when_the_next_update_begins(tmp_path, capacity):
    def memory(capacity: int) -> DeviceMemory:
        batch = {"prompts_per_step": 6, "micro_batch_tokens": 16384}
        plan = cut(capacity, models={"policy": write_model(tmp_path / "m")}, batch=batch, rollout={"max_sequences": 1})
        assert plan.memory is not None
        return plan.memory.cpu

    lockstep, ahead = memory(0), memory(capacity)
    share = ahead.phases["weights of policy travel"]["weights being sent"]
    assert ahead.phases["checkpoint"]["weights being sent"] == share
    for phase in ("policy trains", "policy scores"):
        assert "weights being sent" not in ahead.phases[phase]
    assert ahead.phases["policy trains"] == lockstep.phases["policy trains"]
    more = {phase: ahead.totals[phase] - lockstep.totals[phase] for phase in lockstep.phases}
    assert more["policy trains"] == (capacity - 1) * share
    assert more["weights of policy travel"] == more["checkpoint"] == capacity * share


def test_the_peak_of_each_rank_is_its_own(tmp_path):
    recipe = make_recipe(
        models={"policy": write_model(tmp_path / "m")}, layout=BEHIND, channels={"rollout": {"capacity": 1}}
    )
    plan = make_plan(recipe, resolve_workflow("grpo"), Cluster(4))
    assert plan.memory is not None
    pools = plan.memory.peaks
    assert [one.ranks for one in pools] == [[0, 1], [2, 3]]
    for one in pools:
        for rank in one.ranks:
            alone = estimate_memory(recipe, plan, plan.batch.micro_batch_tokens, among=[rank])
            assert alone is not None
            assert (alone.cpu.peak, alone.accelerator.peak) == (one.cpu, one.accelerator)
    assert pools[0].cpu != pools[1].cpu
    assert plan.memory.cpu.peak == max(one.cpu for one in pools)
    read = json.loads(json.dumps(plan.memory.to_json()))
    assert [one["ranks"] for one in read["peaks"]] == ["0-1", "2-3"]
    assert [one["cpu"] for one in read["peaks"]] == [one.cpu for one in pools]


def test_a_reader_sees_loops_and_channels():
    plan = cut(2)
    read = json.loads(json.dumps(plan.to_json()))
    assert read["loops"] == [
        {
            "name": "rollout",
            "nodes": ["rollout", "reward", "advantage", "samples"],
            "ranks": "0-1",
            "lag": 2,
            "is_continuous": False,
        },
        {"name": "old", "nodes": ["old", "policy"], "ranks": "2-3", "lag": 0, "is_continuous": False},
    ]
    assert [(c["name"], c["capacity"], c["max_staleness"]) for c in read["channels"]] == [
        ("rollout->old", 2, 2),
        ("policy=>rollout", 2, 2),
    ]
    assert {edge["kind"] for edge in read["edges"]} == {"local", "channel"}
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=160))
    text = " ".join(file.getvalue().split())
    assert "rollout 0-1 2 iterations ahead rollout, reward, advantage, samples" in text
    assert "old 2-3 trains: its iterations are the steps old, policy" in text
    assert "policy=>rollout weights 2 iterations 2 updates weights(policy->0-1)" in text
    assert "pull(rollout->old) -> old -> policy -> push(policy=>rollout)" in text


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_loop_that_is_ahead_needs_room_for_new_weights_and_for_all_that_it_begins(tmp_path, capacity):
    def memory(**channel: object) -> DeviceMemory:
        plan = cut(
            layout=BEHIND,
            channels={"rollout": {"capacity": capacity} | channel},
            models={"policy": write_model(tmp_path / "m")},
            batch={"prompts_per_step": 64, "micro_batch_tokens": 1024},
            rollout={"max_sequences": 9999},
        )
        assert plan.memory is not None
        return plan.memory.cpu

    lockstep, fixed, continuous = memory(capacity=0), memory(), memory(mode="continuous")
    assert "weights that arrive" not in lockstep.resident
    for ahead in (fixed, continuous):
        assert ahead.resident["weights that arrive"] == ahead.resident["policy engine's weights"]
    assert dict(continuous.resident) == dict(fixed.resident)
    caches = [one.phases["policy generates"]["kv cache"] for one in (lockstep, fixed, continuous)]
    assert caches == [caches[0], caches[0], (1 + capacity) * caches[0]]
    travel = [one.phases["weights of policy travel"].items() for one in (lockstep, fixed, continuous)]
    generates = [one.phases["policy generates"].items() for one in (lockstep, fixed, continuous)]
    assert not travel[0] & generates[0]
    assert travel[1] <= generates[1], "it generates meanwhile"
    assert travel[2] <= generates[2]


@pytest.mark.parametrize(("vocabulary", "blocks"), [(1000, 1 << 19), (30_000_000, 5 << 30)])
def test_weights_that_arrive_for_an_accelerator_are_in_blocks_of_pinned_memory(tmp_path, vocabulary, blocks):
    recipe = make_recipe(
        models={"policy": {"path": write_model(tmp_path / "m", vocab_size=vocabulary), "compute_dtype": "bfloat16"}},
        layout=BEHIND,
        channels={"rollout": {"capacity": 1}},
    )
    plan = make_plan(recipe, resolve_workflow("grpo"), Cluster(4))
    estimate = estimate_memory(recipe, plan, 1024, among=[0])
    size = plan.sizes["policy"].num_parameters * 2
    assert estimate.cpu.resident["weights that arrive"] == size
    # A small model fits into a block; of a large one, the words alone are rounded up to 4 GiB, and the rest to 1 GiB.
    alone = 0 if vocabulary == 1000 else (4 << 30) - vocabulary * 64 * 2
    assert estimate.accelerator.host["weights that arrive"] == blocks + alone
    assert size < blocks


def test_weights_before_are_counted_where_differences_may_be_sent(tmp_path):
    def memory(rank: int, weights: str, engine: str = "native", dtype: str = "bfloat16", capacity: int = 1) -> dict:
        rollout = {"engine": engine, "weights": weights, "external": {"python": "python3"}}
        recipe = make_recipe(
            models={"policy": {"path": write_model(tmp_path / "m"), "compute_dtype": dtype}},
            layout=POOLS,
            channels={"rollout": {"capacity": capacity}} if capacity else {},
            rollout=rollout,
        )
        plan = make_plan(recipe, resolve_workflow("grpo"), Cluster(4))
        estimate = estimate_memory(recipe, plan, 1024, among=[rank])
        sizes = plan.sizes["policy"].num_parameters * (2 if dtype == "bfloat16" else 4) // 2  # two train, two generate
        cpu, host = (
            {name: kind[name] for name in ("weights sent last", "weights received last") if name in kind}
            for kind in (estimate.cpu.resident, estimate.accelerator.host)
        )
        return {"cpu": cpu, "host": host, "share": sizes}

    for weights in ("auto", "difference"):
        found = memory(2, weights)
        pinned = 1 << (found["share"] - 1).bit_length()
        assert found["cpu"] == {"weights sent last": found["share"]}
        assert found["host"] == {"weights sent last": pinned}
        assert memory(0, weights)["cpu"] == {}, "a native engine has them"
        assert memory(0, weights, "vllm")["cpu"] == {}, "for a restart there is a copy in any case"
        found = memory(0, weights, "sglang")
        assert found["cpu"] in ({}, {"weights received last": found["share"]})
    assert memory(2, "whole")["cpu"] == memory(2, "auto", dtype="float32")["cpu"] == {}
    lockstep = memory(2, "auto", capacity=0)
    assert lockstep["cpu"] == {"weights sent last": lockstep["share"]}
    assert lockstep["host"] == {}, "accelerators send all numbers"
    assert memory(2, "difference", dtype="float32")["cpu"]


def test_the_picture_has_a_lane_for_each_loop_and_channels_between_them():
    plan = cut(2, layout=THREE, algorithm=KL)
    lanes, wires, boxes = [], {}, {}
    for part in ET.fromstring(draw_plan(plan)).iter():
        kinds, rect, texts = part.get("class", "").split(), part.find("{*}rect"), part.findall("{*}text")
        if kinds == ["lane"]:
            lanes.append((texts[0].text, *sides(rect)))
        elif "box" in kinds and texts and texts[0].get("class") == "name":
            boxes[texts[0].text] = sides(rect)
        elif "link" in kinds and texts and len(texts) == 2:
            wires[texts[0].text] = texts[1].text, part.find("{*}path").get("d"), part.find("{*}title").text
    assert [title for title, *_ in lanes] == [
        "loop rollout, ranks 0, 2 iterations ahead",
        "loop reward, ranks 1-3, trains: its iterations are the steps",
    ]
    (_, _, _, first_end, _), (_, second, *_) = lanes
    assert first_end < second
    for (_, left, top, right, bottom), loop in zip(lanes, plan.loops, strict=True):
        for name in loop.nodes:
            x1, y1, x2, y2 = boxes[name]
            assert left < x1 < x2 < right
            assert top < y1 < y2 < bottom
    assert wires.keys() == {"rollout->reward", "policy=>rollout"}
    assert {note for note, *_ in wires.values()} == {"2 in flight, at most 2 updates old"}
    (_, rows, sent), (_, weights, _) = wires["rollout->reward"], wires["policy=>rollout"]
    assert (rows.partition(" ")[0], rows.partition("H")[2]) == (f"M{first_end:.1f}", f"{second:.1f}")
    assert (weights.partition(" ")[0], weights.partition("H")[2]) == (f"M{second:.1f}", f"{first_end:.1f}")
    assert "tokens" in sent


def sides(rect):
    x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


# What is refused


def refused(workflow: Workflow | str = "grpo", **sections: object) -> tuple[str, str]:
    with pytest.raises(RecipeError) as caught:
        cut(workflow=workflow, **sections)
    problem = only_problem(caught.value)
    return problem.key, problem.message


REFUSALS = {
    "one pool": ({"layout": {}}, "channels.rollout", "'rollout' and 'policy' share rank 0"),
    "overlapping pools": (
        {"layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "1-3"}}},
        "channels.rollout",
        "'rollout' and 'policy' share rank 1, so one waits while the other works",
    ),
    "a node that shares ranks with both": (
        {"layout": POOLS | {"reward": {"ranks": "1-2"}}},
        "channels.rollout",
        "'rollout' and 'policy' are joined by other nodes on ranks 0-3",
    ),
    "no edge": ({"channels": {"policy": {"capacity": 1}}}, "channels.policy", "no rows leave ranks 2-3"),
    "no such node": (
        {"channels": {"polici": {"capacity": 1}}},
        "channels.polici",
        "no node that runs is called so (did you mean 'policy'?)",
    ),
    "a node that is pruned": (
        {"channels": {"reference": {"capacity": 1}}},
        "channels.reference",
        "no node that runs is called so",
    ),
    "two capacities of one pool": (
        {"channels": {"rollout": {"capacity": 1}, "reward": {"capacity": 2}}},
        "channels.reward",
        "has capacity=2, and channels.rollout has capacity=1, but both nodes are on ranks 0-1",
    ),
    "a staleness that the capacity exceeds": (
        {"channels": {"rollout": {"capacity": 3, "max_staleness": 5}}, "batch": {"updates_per_step": 2}},
        "channels.rollout.max_staleness",
        "is 5, but capacity=3 with batch.updates_per_step=2 trains rows that are 6 optimizer steps old: set at least 6",
    ),
    "windows": (
        {"batch": {"windows_per_step": 2}},
        "batch.windows_per_step",
        "is 2, but the rows of an iteration go through channels.rollout in one piece",
    ),
    "roll-backs": (
        {"guards": {"reward_failures_action": "roll_back"}},
        "guards.reward_failures_action",
        "is roll_back, but the loops at the two ends of channels.rollout do not see what happens in each other's",
    ),
    "repeated nodes": (
        {"workflow": "dapo"},
        "channels.rollout",
        "does not go with a workflow that repeats nodes (rollout, reward, keep)",
    ),
    "a circle without capacity": (
        {"workflow": "ppo", "layout": POOLS | {"critic": {"ranks": "2-3"}}, "algorithm": GAE},
        "channels.rollout",
        "takes values of 'values' on ranks 2-3 without a channel, so that it would wait for its own iteration to come",
    ),
    "a way around the channel": (
        {"layout": THREE, "channels": {"reward": {"capacity": 1}}},
        "channels.reward",
        "of 'rollout' on ranks 0 without a channel, so that the two go through iterations together, and with 'policy'",
    ),
    "three loops": (
        {"layout": THREE, "channels": {"rollout": {"capacity": 1}, "reward": {"capacity": 1}}},
        "channels",
        "cut the workflow into 3 loops (rollout; reward, advantage, samples; old, policy)",
    ),
    "rows both ways": (
        {
            "workflow": "ppo",
            "layout": POOLS | {"critic": {"ranks": "2-3"}},
            "algorithm": GAE,
            "channels": {"rollout": {"capacity": 1}, "policy": {"capacity": 1}},
        },
        "channels.policy",
        "'advantage' would take rows of 'values' through it, but rows go to",
    ),
    "old weights": (
        {"layout": POOLS | {"old": {"ranks": "0-1"}}},
        "channels.rollout",
        "'old' uses 'policy' on ranks 0-1, before the channel, with weights that are old then",
    ),
}


@pytest.mark.parametrize(("sections", "key", "message"), REFUSALS.values(), ids=REFUSALS)
def test_channels_that_cannot_work_are_refused_with_a_remedy(sections, key, message):
    found = refused(**sections)
    assert found[0] == key
    assert message in found[1]
    assert ": " in found[1].replace(" (did you mean", ": ").replace(" (known", ": "), "a remedy follows"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vllm", "is keep, but the engine 'vllm' can only recompute: set it to recompute"),
        ("tests.contracts.spanning_engine:make", "only between two iterations: leave channels.*.mode at fixed_lag"),
    ],
)
def test_an_engine_that_cannot_keep_its_cache_is_refused(engine: str, message: str):
    channel = {"rollout": {"capacity": 1, "mode": "continuous"}}
    rollout = {"engine": engine, "external": {"python": "python3"}}
    found = refused(layout=BEHIND, channels=channel, rollout=rollout)
    assert found[0] == "channels.rollout.cache", found
    assert message in found[1]


@pytest.mark.parametrize(
    ("use", "role", "ranks", "message"),
    [
        ("train", "other", "0-1", "'extra' trains 'other' on ranks 0-1, before the channel"),
        ("generate", "policy", "2-3", "'extra' generates with 'policy' on ranks 2-3, behind the channel"),
        ("score", "policy", "0-1", "'extra' uses 'policy' on ranks 0-1, before the channel, with weights that are old"),
    ],
)
def test_each_loop_does_what_it_is_for(monkeypatch, use, role, ranks, message):
    spec = StageSpec("x:y", reads=("prompt_tokens",), roles={"model": use}, has_effect=True)
    monkeypatch.setitem(BUILTIN_STAGES, "extra", spec)
    key, found = refused(
        resolve_workflow("grpo").node("extra", run="extra", role=role),
        layout=POOLS | {"extra": {"ranks": ranks}},
        models=dict.fromkeys(("policy", "other"), "/no/such/model") if role == "other" else {"policy": "/no/such"},
    )
    assert key == "channels.rollout"
    assert message in found


def test_what_generates_is_what_is_trained():
    actor = Workflow("own").node("rollout", run="rollout", role="actor")
    workflow = end(actor.node("reward", run="reward", after="rollout"), "reward")
    nodes = tuple(node if node.name != "policy" else replace(node, role="policy") for node in workflow.nodes)
    models = {"models": dict.fromkeys(("policy", "actor"), "/no/such/model")}
    old = Node("old", "log_probs", "policy", ("rollout",))
    workflow = replace(workflow, nodes=(*nodes[:-1], old, replace(nodes[-1], after=("advantage", "old"))))
    key, message = refused(workflow, **models)
    assert key == "channels.rollout"
    assert "no role that generates on ranks 0-1 is trained behind it" in message


def test_a_capacity_is_not_negative():
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        make_recipe(channels={"rollout": {"capacity": -1}})


def test_without_capacity_there_is_no_channel():
    assert not make_recipe(channels={"rollout": {"capacity": 0}}).open_channels


@pytest.mark.parametrize(
    ("channel", "words"),
    [
        ({"capacity": 0, "mode": "continuous"}, "set capacity to at least 1"),
        ({"capacity": 1, "stragglers": "defer"}, "set mode: continuous"),
        ({"capacity": 1, "cache": "recompute"}, "set mode: continuous"),
    ],
)
def test_settings_of_continuous_generation_need_it(channel: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        make_recipe(channels={"rollout": channel})


# Any cut


@dataclass(frozen=True)
class Case:
    """A workflow of which some nodes generate, before a channel, and others train, with layouts of their own."""

    workflow: Workflow
    specs: dict[str, StageSpec]
    layout: dict[str, dict[str, object]]
    capacity: int

    def plan(self) -> Plan:
        recipe = make_recipe(
            models={"policy": "/no/such/model"},
            layout=self.layout,
            channels={"n0": {"capacity": self.capacity}},
        )
        with patch.dict(BUILTIN_STAGES, self.specs):
            return make_plan(recipe, self.workflow, Cluster(5))


@st.composite
def cases(draw) -> Case:
    workflow, specs, layout = Workflow("any"), dict[str, StageSpec](), dict[str, dict[str, object]]()
    num_before, num_behind = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    before: dict[str, set[str]] = {}
    for index in range(num_before + num_behind):
        name, known = f"n{index}", sorted(before)
        is_behind, is_last = index >= num_before, index == num_before + num_behind - 1
        readable = [f"{column}{i}" for i in range(index) for column in "ab"] + ["prompt_tokens"]
        reads = draw(st.lists(st.sampled_from(readable), unique=True, max_size=3)) if index else ["prompt_tokens"]
        is_filter = index > 0 and not is_last and draw(st.integers(0, 5)) == 0
        rows = "expand" if index == 0 else "filter" if is_filter else "same"
        use = "generate" if index == 0 else "train" if is_last else "none"
        uses = {} if use == "none" else {"model": use}
        writes = (f"a{index}", f"b{index}")
        whole = draw(st.booleans())
        specs[name] = StageSpec(
            "x:y", reads=tuple(reads), writes=writes, rows=rows, needs_whole_groups=whole, roles=uses, has_effect=True
        )
        before[name] = set(known)
        role = "policy" if use != "none" else None
        workflow = workflow.node(name, run=name, role=role, after=known[-1:])
        pools = ["2", "3", "4", "2-4", "3-4"] if is_behind else ["0", "1", "0-1"]
        layout[name] = {"ranks": draw(st.sampled_from(pools))}
    layout[f"n{num_before + num_behind - 1}"] = {"ranks": "2-4"}
    layout["n0"] = {"ranks": "0-1"}
    return Case(workflow, specs, layout, draw(st.integers(1, 3)))


@given(case=cases())
def test_every_node_finds_its_columns_when_rows_come_through_a_channel(case):
    try:
        plan = case.plan()
    except RecipeError:
        assume(False)
        raise
    assert len(plan.loops) == 2
    assert find_circle(plan.loops, plan.channels) == ()
    tables = Tables(plan)
    rows = next(channel for channel in plan.channels if channel.kind == "rows")
    made: set[str] = set()
    for loop in plan.loops:
        for action in loop.schedule:
            if isinstance(action, RunNode):
                made.add(action.node)
            elif action == Push(rows.name):
                assert {move.source for move in rows.reshards} <= made, "what is pushed has been made"
            for entry in rows.reshards if action == Pull(rows.name) else (action,):
                if isinstance(entry, Reshard):
                    assert entry.is_late == ((entry.row_set, rows_of(entry.target_layout)) in tables.columns)
                tables.execute(entry)
    assert made == set(case.specs)
    for rank in range(5):
        assert all(rank in plan.ranks_of(action) for action in plan.chain(rank))


# Continuous generation

TRAINING = {name: {"ranks": "2-3"} for name in ("advantage", "policy")}
EXTERNAL = {"engine": "vllm", "external": {"python": "python3"}}
CONTINUOUS = {"rollout": {"capacity": 2, "mode": "continuous"}}


def test_ranks_that_generate_continuously_walk_on_their_own():
    plan = cut(layout=POOLS | TRAINING, channels=CONTINUOUS)
    first, second = plan.loops
    assert (first.lag, first.is_continuous, first.stragglers) == (2, True, "wait")
    assert not second.is_continuous
    assert names(plan)[0] == ["pull(policy=>rollout)", "load", "rollout", "reward", "push(rollout->old)"]
    assert {channel.max_staleness for channel in plan.channels} == {2}


@pytest.mark.parametrize(
    ("stragglers", "words"),
    [("wait", "longer than 3 steps"), ("defer", "would be over 4 updates old"), ("cancel", "old is dropped")],
)
def test_the_plan_says_what_stragglers_cost(stragglers: str, words: str):
    channel = {"capacity": 2, "max_staleness": 4, "mode": "continuous", "stragglers": stragglers}
    console = Console(file=io.StringIO(), width=160)
    print_plan(cut(layout=POOLS | TRAINING, channels={"rollout": channel}), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "at most 2 iterations ahead, continuously" in text
    assert words in text


@pytest.mark.parametrize(
    ("layout", "sections", "words"),
    [
        (POOLS, {}, "'advantage' before the channel needs the groups of all ranks: run it behind the channel"),
        (TRAINING | {"rollout": {"ranks": "0-1", "tp": 2}}, {"rollout": EXTERNAL}, "the ranks of one engine"),
        (TRAINING | {"rollout": {"ranks": "0"}, "reward": {"ranks": "1"}}, {}, ""),
        (TRAINING | {"rollout": {"ranks": "0-1"}, "reference": {"ranks": "0-1"}}, {"algorithm": KL}, "scores with a"),
    ],
)
def test_what_continuous_generation_cannot_work_with_is_refused(
    layout: object, sections: dict[str, object], words: str
):
    if not words:  # the other ranks train, too
        assert cut(layout=layout, channels=CONTINUOUS, **sections).loops[0].nodes == ("rollout",)
        return
    with pytest.raises(RecipeError) as caught:
        cut(layout=layout, channels=CONTINUOUS, **sections)
    problem = only_problem(caught.value)
    assert problem.key == "channels.rollout.mode"
    assert words in problem.message


def test_an_engine_says_what_it_does_with_its_cache():
    with pytest.raises(RecipeError) as caught:
        cut(layout=POOLS | TRAINING, channels=CONTINUOUS, rollout=EXTERNAL)
    problem = only_problem(caught.value)
    assert problem.key == "channels.rollout.cache"
    assert "is keep, but the engine 'vllm' can" in problem.message


def test_only_continuous_generation_can_be_followed() -> None:
    with pytest.raises(ValueError, match=r"run.follow=other does continuous generation again, but no channel"):
        make_recipe(run={"follow": "other"})
