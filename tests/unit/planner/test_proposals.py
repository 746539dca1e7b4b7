"""Layouts that a run may take on are found by the seconds that its own nodes have taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.end_to_end.two_judges import layout, workflow
from tests.unit.recipes import make_recipe, plan_of, write_model

from leaderless.config.layout import LayoutConfig
from leaderless.planner.placement.replan_candidates import FEW_PROPOSED, NUM_PROPOSED, _moved, describe, propose
from leaderless.planner.placement.replanning import Links, NodeSeconds, find_slow, pairs_in_rounds, step_seconds
from leaderless.planner.plan import Plan

JUDGES = "tests.end_to_end.two_judges:workflow"


def seconds_of(plan: Plan, **known: float) -> dict[str, NodeSeconds]:
    """What the nodes of a plan have taken on their ranks."""
    return {name: NodeSeconds({len(plan[name].layout.ranks): seconds}) for name, seconds in known.items()}


def best_of(plans: Mapping[str, Plan], nodes: Mapping[str, NodeSeconds], links: Links | None = None) -> Plan:
    return min(plans.values(), key=lambda plan: step_seconds(plan, nodes, links=links))


def always(_: Plan) -> bool:
    return True


def test_a_slow_stage_gets_more_ranks() -> None:
    settings = {"layout": layout("0", "1-2")}
    like = plan_of(workflow(), 3, **settings)
    nodes = seconds_of(like, rollout=3.0, first=8.0, second=2.0, policy=3.0)
    found = propose(make_recipe(workflow=JUDGES, **settings), like, nodes, always)
    assert 1 < len(found) <= NUM_PROPOSED
    best = best_of(found, nodes)
    assert step_seconds(like, nodes) == pytest.approx(3 + 8 + 3)
    assert step_seconds(best, nodes) == pytest.approx(3 + 4 + 3), "12 s of judges are shared by all ranks"
    places = [[plan[name].layout.ranks for name in ("first", "second", "policy")] for plan in found.values()]
    assert [(0, 1), (2,), (0, 1, 2)] in places, "models stay where they are"


def test_a_node_keeps_its_other_settings_and_its_company() -> None:
    settings = {
        "layout": {"rollout": {"ranks": "0-1", "groups": "whole"}, "reward": {"ranks": "2"}, "policy": {"ranks": "2"}}
    }
    like = plan_of("grpo", 3, **settings)
    nodes = seconds_of(like, rollout=1.0, reward=0.0, policy=9.0)
    found = propose(make_recipe(**settings), like, nodes, always)
    apart = next(plan for plan in found.values() if plan["rollout"].layout.ranks == (0,))
    assert apart["reward"].layout.ranks == apart["policy"].layout.ranks == (1, 2)
    assert apart.layout["rollout"].groups == "whole"


def test_other_numbers_of_ranks_divide_experts_where_they_can(tmp_path: Path) -> None:
    mixture = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings = {
        "models": {"policy": write_model(tmp_path / "model", **mixture)},
        "layout": {"rollout": {"ranks": "0-2"}, "policy": {"ranks": "3-4", "ep": 2}},
    }
    like = plan_of("grpo", 5, **settings)
    found = propose(make_recipe(**settings), like, seconds_of(like, rollout=1.0, policy=9.0), always)
    sizes = {(len(plan["policy"].layout.ranks), plan["policy"].layout.ep) for plan in found.values()}
    assert sizes == {(1, 1), (2, 2), (3, 3)}, "4 and 5 do not divide 6"
    in_pairs = LayoutConfig(ranks="1-4", ep=2)
    moved = [_moved(in_pairs, "policy", ranks, like).ep for ranks in ("0-4", "3-4", "1-4")]
    assert moved == [1, 2, 2], "pairs stay pairs where they can"
    assert _moved(LayoutConfig(ranks="1-4", ep=2, pp=2), "policy", "1-2", like).ep == 1, "a stage has one rank"


def test_generation_stays_ahead_by_the_same_lag() -> None:
    settings = {
        "layout": {"rollout": {"ranks": "0-2"}, "policy": {"ranks": "3"}},
        "channels": {"rollout": {"capacity": 2}},
    }
    like = plan_of("grpo", 4, **settings)
    nodes = seconds_of(like, rollout=2.0, policy=6.0)
    found = propose(make_recipe(**settings), like, nodes, always)
    assert found
    assert all([loop.lag for loop in plan.loops] == [2, 0] for plan in found.values())
    best = best_of(found, nodes)
    assert [loop.ranks for loop in best.loops] == [(0, 1), (2, 3)]
    assert best["advantage"].layout.ranks == (0, 1), "it goes ahead, as before"


def test_what_does_not_fit_into_memory_is_never_proposed() -> None:
    settings = {"layout": layout("0", "1-2")}
    like = plan_of(workflow(), 3, **settings)
    nodes = seconds_of(like, rollout=1.0, first=8.0, second=2.0, policy=1.0)
    recipe, seen = make_recipe(workflow=JUDGES, **settings), list[str]()

    def fits(plan: Plan) -> bool:
        seen.append(describe(plan))
        return len(plan["policy"].layout.ranks) == 3

    found = propose(recipe, like, nodes, fits)
    assert found.keys() < set(seen)
    assert all(len(plan["policy"].layout.ranks) == 3 for plan in found.values())


def test_a_thousand_ranks_are_searched_in_a_second() -> None:
    settings = {
        "layout": {"rollout": {"ranks": "0-511"}, "policy": {"ranks": "512-1023"}},
        "batch": {"prompts_per_step": 1024},
        "algorithm": {"kl": {"coefficient": 0.1}},
    }
    like, recipe = plan_of("grpo", 1024, **settings), make_recipe(**settings)
    nodes = seconds_of(like, rollout=9.0, reward=0.1, reference=1.0, policy=3.0)
    begin = time.process_time()
    found = propose(recipe, like, nodes, always)
    took = time.process_time() - begin
    assert 1 <= len(found) <= FEW_PROPOSED
    assert took < 1.0, f"{took:.2f} s"
    assert step_seconds(best_of(found, nodes), nodes) < step_seconds(like, nodes)


def test_a_node_leaves_a_host_whose_network_is_slow() -> None:
    apart = {"rollout": {"ranks": "1-2"}, "reference": {"ranks": "0"}, "policy": {"ranks": "1-2"}}
    settings = {"layout": apart, "algorithm": {"kl": {"coefficient": 0.1}}}
    like, hosts = plan_of("grpo", 3, **settings), {0: 0, 1: 1, 2: 2}
    nodes = seconds_of(like, rollout=1.0, reference=2.0, policy=4.0)
    nodes["policy"].measure(2, 4.0)
    links = find_slow(hosts, [0.002, 0.5, 0.5], 1_000_000)
    assert links.byte_s == {2: 5e-7}
    nodes["policy"].measure(2, 9.0, links.of((1, 2)))
    assert step_seconds(like, nodes, links=links) == pytest.approx(1 + 2 + 9)
    best = best_of(propose(make_recipe(**settings), like, nodes, always, links), nodes, links)
    assert best["policy"].layout.ranks == (0, 1), "gradients do not go to host 2"
    assert best["reference"].layout.ranks == (2,)
    assert step_seconds(best, nodes, links=links) <= 1 + 2 + 4
    nodes["policy"].measure(2, 4.2, links.of((0, 1)))
    assert nodes["policy"].on(2) == pytest.approx(4.2)
    assert nodes["policy"].num_bytes == pytest.approx(4.8 / 5e-7), "seen from both sides"


@pytest.mark.parametrize(
    ("pair_s", "slow"),
    [
        ([0.002, 0.002, 0.003, 0.002], []),
        ([0.002, 0.4, 0.5, 0.002], [2]),
        ([0.002, 0.009, 0.009, 0.002], []),  # too quick for a verdict
        ([0.5], []),  # of two hosts both are as slow
        ([], []),
    ],
)
def test_a_host_is_slow_if_both_its_neighbors_find_so(pair_s: list[float], slow: list[int]) -> None:
    links = find_slow({0: 0, 1: 0, 2: 1, 3: 2, 4: 3}, pair_s, 1000)
    assert list(links.byte_s) == slow
    assert links.of((0, 1)) == 0.0, "one host"
    assert (links.of((1, 3)) > 0) == bool(slow)


def test_each_pair_of_hosts_is_tested_once_and_no_host_twice_at_a_time() -> None:
    for num_hosts in range(3, 9):
        rounds = pairs_in_rounds(num_hosts)
        assert sorted(pair for pairs in rounds for pair in pairs) == list(range(num_hosts))
        for pairs in rounds:
            busy = [host % num_hosts for pair in pairs for host in (pair, pair + 1)]
            assert len(busy) == len(set(busy)), pairs
    assert (pairs_in_rounds(1), pairs_in_rounds(2)) == ([], [[0]])


def test_weights_pass_a_slow_link_once_for_each_rank_behind_it() -> None:
    links = Links({0: 0, 1: 0, 2: 1, 3: 2}, {1: 2.0})
    assert links.sending((2,), (0, 1)) == 4.0, "both copies leave host 1"
    assert links.sending((0, 1), (2,)) == 2.0
    assert links.sending((1, 2), (0, 2)) == 2.0, "half of each weight, out and in"
    assert links.sending((0,), (1, 3)) == 0.0
