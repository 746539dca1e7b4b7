"""The metrics that say where the time of pools of ranks goes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.tiny import tiny_recipe
from tests.unit.observability.test_metrics import Alone

from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.observability.clock import Clock, by_pool, in_short, total_seconds
from leaderless.observability.metrics import Metrics
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.worker.agreement import SecondsReport, StepMetrics, pools_of, state_of


def plan_in_pools(folder: Path) -> Plan:
    """Rank 0 generates, ranks 1 and 2 train."""
    ranks = {"rollout": "0", "reward": "1-2", "policy": "1-2"}
    recipe = tiny_recipe(folder, "x", {"layout": {node: {"ranks": r} for node, r in ranks.items()}}).recipe
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(3))


def test_ranks_that_run_the_same_nodes_are_a_pool(tmp_path: Path) -> None:
    assert pools_of(plan_in_pools(tmp_path), range(3)) == {(0,): "0", (1, 2): "1-2"}


def test_each_entry_of_a_chain_has_a_state(tmp_path: Path) -> None:
    plan = plan_in_pools(tmp_path)

    def states(rank: int) -> dict[str, str]:
        return {str(action): state_of(action, plan, rank) for action in plan.chain(rank)}

    first, second = states(0), states(1)
    assert (first["load"], first["rollout"]) == ("data", "generate")
    assert (second["reward"], second["policy"]) == ("grade", "train")
    assert first["weights(policy->0)"] == "wait_weights", "a rank that does not train has nothing else to do there"
    assert second["weights(policy->0)"] == "weights"
    assert {state for name, state in first.items() if name.startswith("reshard")} == {"move"}


def test_a_rank_reports_its_seconds_in_its_own_pool_only(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 4.0, 9.0])
    clock, metrics = Clock(lambda: next(times)), Metrics()
    report = SecondsReport(plan_in_pools(tmp_path), 1, clock)
    with clock.doing("train"):
        pass
    report.add_to(metrics)
    numbers = {name: value for name, value in metrics.reduce(Alone()).items() if value}
    assert numbers == {"seconds/1-2/train": 3.0, "seconds/1-2/other": 6.0}


def test_states_that_no_rank_was_in_are_left_out_and_other_zeros_stay(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, "x").recipe
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(1))
    metrics = StepMetrics(plan, cast("Transport", SimpleNamespace(rank=0)))
    for name, value in (("seconds/0/train", 0.0), ("seconds/0/other", 6.0), ("reward/failed", 0.0)):
        metrics.of((0,)).mean(name, value, 1)
    numbers, events = metrics.take().reduce(lambda *_: [], lambda _: ProcessGroup((0,), 0))
    assert (numbers, events) == ({"seconds/0/other": 6.0, "reward/failed": 0.0}, [])
    assert metrics.take().reduce(lambda *_: [], lambda _: ProcessGroup((0,), 0))[0] == {}, "the next step begins anew"


def test_the_seconds_of_a_run_are_added_up_by_pool_and_state() -> None:
    rows = [
        {"step": 1, "seconds/0/other": 1.0, "seconds/0/generate": 6.0, "time/step": 9.0},
        {"step": 2, "seconds/0/generate": 3.0, "seconds/1-2/train": 4.0, "seconds/1-2/unknown": 1.0},
    ]
    totals = total_seconds(rows)
    assert totals == {"0": {"generate": 9.0, "other": 1.0}, "1-2": {"train": 4.0}}
    assert list(by_pool(rows[0])["0"]) == ["generate", "other"], "in the usual order"
    assert in_short(totals["0"] | {"log": 0.02}) == "generate 90%, other 10%"
    assert in_short({}) == ""


@pytest.mark.parametrize("name", ["seconds/0-3,8/wait_rows", "seconds/0/other"])
def test_the_metrics_are_known_by_their_names(name: str) -> None:
    from leaderless.observability.known_metrics import known_metric

    assert known_metric(name) is not None
