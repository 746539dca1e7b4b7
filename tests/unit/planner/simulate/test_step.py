"""One whole step, for every data path."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.simulated.controllers import ComparedCluster, ControllerConfig
from tests.unit.planner.simulate.clusters import cluster, network, plan_for, pools_recipe, step_of
from tests.unit.planner.test_joins import joint
from tests.unit.recipes import make_recipe, write_model

from leaderless.config import RecipeError, all_keys
from leaderless.config.layout import ChannelConfig
from leaderless.planner import Cluster, Layout, Load, Reshard, make_plan
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.network import Network
from leaderless.planner.simulate.rows import RowPlacement, sample_workload, samplers_of
from leaderless.planner.simulate.step import Loaded, Moved, Synced, Worked, estimate_step, events_of, walk_peers
from leaderless.planner.simulate.transfers import Cost, parcels_of, updates_cost

CHANGES = {
    "controllers.one.pads_rows": False,
    "host.devices": 4,
    "host.interfaces": 2,
    "controllers.one.dataloader_processes": 2,
}
"""Settings that cannot be halved."""


def everything_matters() -> ComparedCluster:
    """A cluster in which nothing is free."""
    links = {name: {"latency_us": 5, "bandwidth_gb_per_s": 0.5} for name in ("device", "host", "network")}
    controller = {
        "call_us": 5,
        "serialization_gb_per_s": 1,
        "object_store_gb_per_s": 1,
        "network_gb_per_s": 0.1,
        "copy_gb_per_s": 1,
        "dataloader_processes": 1,
    }
    return cluster(
        links=links,
        controllers={"one": controller},
        coordinator__hop_latency_us=5,
        coordinator__hop_bandwidth_gb_per_s=0.1,
        coordinator__assignment_us_per_row=2,
        device__peak_tflops=1e-3,
        device__memory_bandwidth_gb_per_s=1e-1,
        workload__prompt_median_tokens=20,
        workload__response_median_share=0.2,
    )


def test_a_step_is_the_sum_of_what_its_slowest_rank_does(tmp_path):
    recipe = pools_recipe(tmp_path)
    constants = everything_matters()
    links = network(4)
    events = events_of(plan_for(recipe, 4), recipe, sample_workload(recipe, constants.workload), links)
    assert {type(event).__name__ for event in events} == {"Loaded", "Worked", "Moved", "Synced"}
    estimate = step_of(recipe, 4, constants)["ours"]
    assert set(estimate.transitions) == {
        "put(rollout)",
        "put(reward)",
        "put(reference)",
        "put(advantage)",
        "reshard(rollout->2-3)",
        "reshard(reward->2-3)",
        "reshard(reference->2-3)",
        "reshard(advantage->2-3)",
    }
    assert set(estimate.weights) == {"weights(policy->0-1)"}
    assert estimate.transition_seconds == pytest.approx(sum(c.seconds for c in estimate.transitions.values()))
    assert estimate.seconds > estimate.transition_seconds


def test_where_computing_takes_no_time_a_step_is_loading_moving_and_weights(tmp_path):
    settings = everything_matters().model_dump()
    settings["device"] |= {"peak_tflops": 1e9, "memory_bandwidth_gb_per_s": 1e12}
    settings["links"]["host"] = {"latency_us": 0, "bandwidth_gb_per_s": 1e12}  # weights are gathered inside hosts
    constants, recipe = ComparedCluster.model_validate(settings), pools_recipe(tmp_path)
    prompts = sample_workload(recipe, constants.workload).prompts.tokens
    loading = {"ours": max(prompts[:32].sum(), prompts[32:].sum()) / 1e6, "one": prompts.sum() / 1e6}
    links = Network(constants, 4)
    events = events_of(plan_for(recipe, 4), recipe, sample_workload(recipe, constants.workload), links)
    (update,) = (event for event in events if isinstance(event, Worked) and event.node.name == "policy")
    agreeing = {"ours": updates_cost(update.rows, update.holders, 2, np.array([2, 3]), links).seconds, "one": 0.0}
    for way, estimate in step_of(recipe, 4, constants).items():
        loading[way] += agreeing[way]
        weights = sum(cost.seconds for cost in estimate.weights.values())
        assert weights > 0
        assert estimate.seconds == pytest.approx(loading[way] + estimate.transition_seconds + weights, rel=1e-6), way


def test_a_controller_lets_pools_work_at_the_same_time(tmp_path):
    # Scoring with the policy on one pool and with the reference on the other takes as long as the slower of the two.
    slow = cluster(device__peak_tflops=1e-6, device__training_utilization=1, dataloader__tokens_per_s=1e12)
    both = step_of(pools_recipe(tmp_path), 4, slow)["one"].seconds
    alone = step_of(pools_recipe(tmp_path, algorithm={}), 4, slow)["one"].seconds
    assert both == pytest.approx(alone, rel=0.1)


def test_every_row_is_somewhere_and_a_response_is_where_its_prompt_is(tmp_path):
    recipe = pools_recipe(tmp_path)
    constants = cluster()
    events = events_of(plan_for(recipe, 8), recipe, sample_workload(recipe, constants.workload), network(8))
    loaded = next(event for event in events if isinstance(event, Loaded))
    rollout = next(event for event in events if isinstance(event, Worked) and event.node.name == "rollout")
    assert np.bincount(loaded.holders).tolist() == [16, 16, 16, 16]
    assert np.array_equal(rollout.holders_after, np.repeat(loaded.holders, 4))
    moves = [event for event in events if isinstance(event, Moved)]
    assert [move.routes.is_agreed for move in moves] == [False, True, True, True]
    assert all(np.array_equal(move.routes.owners, moves[0].routes.owners) for move in moves)
    update = [event for event in events if isinstance(event, Worked)][-1]
    assert np.array_equal(update.holders, 4 + moves[0].routes.owners)
    action = moves[0].action
    costs = moves[0].routes.rows.costs(action.columns, moves[0].routes.holders, action.quadratic_tokens)
    work = np.bincount(moves[0].routes.owners, weights=costs)
    assert work.max() < 1.2 * work.mean()


@pytest.mark.parametrize(
    "layout", [{}, {"rollout_b": {"ranks": "2-3"}}, {"a": {"ranks": "0-1"}, "b": {"ranks": "2-3"}}]
)
def test_rows_of_two_policies_are_joined_and_selected(tmp_path, layout):
    model = write_model(tmp_path / "model")
    roles = {"b": {"rollout": {"max_response_tokens": 32}}}
    recipe = pools_recipe(tmp_path, models={"a": model, "b": model}, roles=roles, layout=layout, algorithm={})
    plan, constants = make_plan(recipe, joint(), Cluster(4)), cluster()
    agents = [node.node.role for node in samplers_of(plan)]
    workload = sample_workload(recipe, constants.workload, agents)
    assert agents == ["a", "b"]
    assert workload.samples.response_tokens.max() > 32 >= workload.further[0].response_tokens.max()
    events = events_of(plan, recipe, workload, network(4))
    seen = {event.node.name: event for event in events if isinstance(event, Worked)}
    assert {name: len(seen[name].rows) for name in ("reward", "advantage", "a", "b")} == {
        **dict.fromkeys(("reward", "advantage"), 2 * 64 * 4),
        **dict.fromkeys("ab", 64 * 4),
    }
    assert np.array_equal(seen["a"].rows.response_tokens, workload.samples.response_tokens)
    assert np.array_equal(seen["b"].rows.response_tokens, workload.further[0].response_tokens)
    if not layout:  # each response is where its prompt was loaded
        assert np.array_equal(seen["reward"].holders, np.tile(np.repeat(np.arange(4), 2 * 4), 16))
        assert np.array_equal(seen["b"].holders, np.tile(np.repeat(np.arange(4), 4), 16))
    assert {*seen["b"].holders} == ({2, 3} if "b" in layout else {0, 1, 2, 3})
    estimate = estimate_step(plan, recipe, workload, constants)
    tokens = workload.samples.tokens.sum() + workload.further[0].tokens.sum()
    assert estimate.tokens_per_s * estimate.seconds == pytest.approx(tokens)


def test_rows_that_came_with_the_same_columns_before_are_spared_and_stay(tmp_path):
    recipe, constants = pools_recipe(tmp_path), cluster()
    plan = plan_for(recipe, 4)
    placement = RowPlacement(plan, sample_workload(recipe, constants.workload))
    placement.load(next(action for action in plan.schedule if isinstance(action, Load)))
    placement.run(plan["rollout"])
    source, first, second = plan["rollout"].layout, Layout((2, 3), 2), Layout((1, 2, 3), 3)
    early = placement.reshard(Reshard("rollout", "rollout", ("tokens",), source, first, keep_groups=False))
    action = Reshard("rollout", "rollout", ("tokens",), source, second, keep_groups=False, spare_layout=first)
    late = placement.reshard(action)
    assert not early.spares
    assert {rank: rows.tolist() for rank, rows in late.spares.items()} == {
        rank: np.flatnonzero(early.owners == rank - 2).tolist() for rank in (2, 3)
    }
    spared, sent = (
        sum(part.sizes.sum() for part in parcels_of(routes, ["tokens"], network(4)).transfers)
        for routes in (late, replace(late, spares={}))
    )
    assert 0 < spared < 0.5 * sent


def test_nothing_moves_where_all_nodes_share_their_ranks(tmp_path):
    recipe = pools_recipe(tmp_path, layout={})
    estimates = step_of(recipe, 4, cluster())
    assert not estimates["ours"].transitions
    assert estimates["ours"].transition_seconds == estimates["ours"].interface_bytes == 0
    assert set(estimates["one"].transitions) == {"rollout", "old", "reference", "policy"}
    assert estimates["one"].interface_bytes > 0


def test_the_ways_differ_in_moving_alone(tmp_path):
    # If nothing that moves data takes time, the two take the same time.
    free = {"latency_us": 0, "bandwidth_gb_per_s": 1e12}
    constants = cluster(
        links={"device": free, "host": free, "network": free},
        controllers={"one": {"call_us": 0, "copy_gb_per_s": 1e12, "dataloader_processes": 10**9}},
        coordinator__hop_bandwidth_gb_per_s=1e12,
        dataloader__tokens_per_s=1e12,
        device__peak_tflops=1e-3,
    )
    estimates = step_of(pools_recipe(tmp_path), 4, constants)
    assert estimates["one"].seconds == pytest.approx(estimates["ours"].seconds, rel=1e-6)
    assert estimates["one"].tokens_per_s == pytest.approx(estimates["ours"].tokens_per_s, rel=1e-6)


def test_a_host_that_is_too_small_is_told_for_each_way(tmp_path):
    recipe = pools_recipe(tmp_path)
    roomy = step_of(recipe, 4, cluster())
    assert roomy["one"].fits_host
    limit = roomy["ours"].host_bytes
    assert limit == 2 * roomy["ours"].process_bytes, "both ranks of a host"
    assert limit < roomy["one"].host_bytes == roomy["one"].process_bytes
    small = step_of(recipe, 4, cluster(host__memory_gib=limit / 2**30))
    assert small["ours"].fits_host
    assert not small["one"].fits_host


NO_COSTS = {"name", "device.memory_gib", "device.compute_dtype", "workload.changed_share"}
CONSTANTS = [
    *(key for key in all_keys(ClusterConfig) if key not in NO_COSTS),
    *(f"controllers.one.{name}" for name in ControllerConfig.model_fields),
]
"""All settings but those that are only displayed, or change the plan, which other tests cover."""


@pytest.mark.parametrize("key", CONSTANTS)
def test_every_constant_changes_something(tmp_path, key):
    recipe, constants = pools_recipe(tmp_path), everything_matters()
    before = step_of(recipe, 4, constants)
    settings = constants.model_dump()
    *parents, last = key.split(".")
    section = settings
    for part in parents:
        section = section[part]
    section[last] = CHANGES.get(key, section[last] / 2)
    if key == "host.memory_gib":
        section[last] = before["one"].host_bytes / 2**31
    assert step_of(recipe, 4, ComparedCluster.model_validate(settings)) != before


def test_the_share_of_weights_that_change_matters_where_differences_are_sent(tmp_path):
    plain = pools_recipe(tmp_path)
    policy = plain.model_of("policy").model_copy(update={"compute_dtype": "bfloat16"})
    recipe = plain.model_copy(update={"models": plain.models | {"policy": policy}})

    def weights_of(weights: str, share: float) -> Cost:
        rollout = recipe.rollout.model_copy(update={"weights": weights})
        constants = cluster(workload__changed_share=share)
        estimate = step_of(recipe.model_copy(update={"rollout": rollout}), 4, constants)["ours"]
        (cost,) = estimate.weights.values()
        return cost

    assert weights_of("auto", 0.01) == weights_of("auto", 0.5) == weights_of("whole", 0.01), "between accelerators"
    few, many = weights_of("difference", 0.01), weights_of("difference", 0.1)
    assert few.interface_bytes < many.interface_bytes < weights_of("whole", 0.01).interface_bytes
    assert few.seconds < many.seconds


def test_loops_work_at_the_same_time(tmp_path):
    recipe = pools_recipe(tmp_path)
    ahead = recipe.model_copy(update={"channels": {"rollout": ChannelConfig(capacity=1)}})
    constants = everything_matters()
    links, workload = Network(constants, 4), sample_workload(recipe, constants.workload)
    lockstep = walk_peers(events_of(plan_for(recipe, 4), recipe, workload, links), links)
    events = events_of(plan_for(ahead, 4), ahead, workload, links)
    estimate = walk_peers(events, links)
    assert (estimate.transitions, estimate.weights) == (lockstep.transitions, lockstep.weights), "the same is sent"
    puts = sum(cost.seconds for name, cost in estimate.transitions.items() if name.startswith("put"))
    moves = sum(cost.seconds for cost in estimate.transitions.values()) - puts
    weights = sum(cost.seconds for cost in estimate.weights.values())
    spent = {(0, 1): puts, (2, 3): moves}  # rows that come through a channel keep the ranks that take them busy
    for event in events:
        if isinstance(event, Loaded):
            spent[event.action.layout.ranks] += float(event.seconds.max())
        elif isinstance(event, Worked):
            spent[event.node.layout.ranks] += float(event.seconds.max())
    assert estimate.seconds == pytest.approx(max(spent.values()))
    assert estimate.seconds > weights > 0, "weights come meanwhile"
    assert estimate.seconds < 0.7 * lockstep.seconds
    slowly = [replace(event, num_bytes=10**12) if isinstance(event, Synced) else event for event in events]
    late = walk_peers(slowly, links)
    assert late.seconds == pytest.approx(sum(cost.seconds for cost in late.weights.values()))
    assert late.seconds > 2 * estimate.seconds


def test_repeated_nodes_cannot_be_simulated(tmp_path):
    recipe = pools_recipe(tmp_path, workflow="dapo", layout={}, algorithm={})
    with pytest.raises(RecipeError, match="'dapo' repeats nodes, and how often depends on rewards"):
        step_of(recipe, 2, cluster())


def test_a_model_of_unknown_size_cannot_be_simulated():
    with pytest.raises(RecipeError, match=r"the size of '/no/such/model' is not known.*name a folder that holds one"):
        step_of(make_recipe(), 2, cluster())


@pytest.mark.parametrize(
    ("workflow", "algorithm", "train"),
    [
        ("ppo", {"advantage": {"type": "gae"}}, {}),
        ("remax", {"advantage": {"type": "remax"}}, {}),
        ("reinforce_pp", {}, {}),
        ("sft", {}, {"response": "answer"}),
    ],
)
def test_other_workflows_are_simulated_too(tmp_path, workflow, algorithm, train):
    data = {"train": {"path": "rows.jsonl", **train}, "max_prompt_tokens": 64, "max_response_tokens": 192}
    recipe = pools_recipe(tmp_path, workflow=workflow, data=data, layout={}, algorithm=algorithm)
    estimates = step_of(recipe, 4, cluster())
    assert 0 < estimates["ours"].seconds < estimates["one"].seconds
    assert estimates["one"].transitions["policy"].interface_bytes > 0


def test_sixteen_thousand_ranks_are_planned_and_simulated_in_a_minute(tmp_path):
    recipe = pools_recipe(
        tmp_path, batch={"prompts_per_step": 2 * 16384, "responses_per_prompt": 4, "micro_batch_tokens": 512}
    )
    begin = time.process_time()
    plan = plan_for(recipe, 16384)
    assert len(plan.hash()) == 64
    assert len(plan.chains()) == 2
    planned = time.process_time()
    estimates = step_of(recipe, 16384, cluster())
    simulated = time.process_time()
    assert planned - begin < 10, "0.1 s on an idle core"
    assert simulated - begin < 60, "8 s on a busy core"
    assert estimates["one"].interface_bytes > 10 * estimates["ours"].interface_bytes


def test_work_grows_with_the_batch_and_falls_with_the_ranks(tmp_path):
    recipe = pools_recipe(tmp_path)
    constants = everything_matters()
    double = pools_recipe(
        tmp_path, batch={"prompts_per_step": 128, "responses_per_prompt": 4, "micro_batch_tokens": 512}
    )
    for way, estimate in step_of(recipe, 4, constants).items():
        assert step_of(double, 4, constants)[way].seconds > estimate.seconds
    assert step_of(recipe, 8, constants)["ours"].seconds < step_of(recipe, 4, constants)["ours"].seconds


def test_the_model_of_a_role_decides(tmp_path):
    small = pools_recipe(tmp_path)
    large = pools_recipe(tmp_path, models={"policy": write_model(tmp_path / "large", num_hidden_layers=16)})
    constants = everything_matters()
    assert step_of(large, 4, constants)["ours"].seconds > 1.5 * step_of(small, 4, constants)["ours"].seconds


def test_a_judge_that_is_a_model_takes_its_time_where_it_runs(tmp_path):
    models = {"policy": write_model(tmp_path / "model"), "judge": write_model(tmp_path / "judge")}
    layout = {node: {"ranks": "0%-50%"} for node in ("rollout", "advantage")}
    layout |= {node: {"ranks": "50%-100%"} for node in ("reward", "policy")}
    constants, found = everything_matters(), {}
    for tokens in (100, 200):
        judge = {"role": "judge", "max_answer_tokens": tokens}
        recipe = pools_recipe(tmp_path, models=models, reward={"judge": judge}, layout=layout)
        workload = sample_workload(recipe, constants.workload)
        events = events_of(plan_for(recipe, 4), recipe, workload, Network(constants, 4))
        (judged,) = (event for event in events if isinstance(event, Worked) and event.node.name == "reward")
        assert judged.seconds.shape == (2,)
        found[tokens] = judged.seconds.max(), walk_peers(events, Network(constants, 4)).seconds
    (short, first), (long, second) = found.values()
    assert 1.5 * short < long
    assert second - first == pytest.approx(long - short), "all ranks wait for it"
