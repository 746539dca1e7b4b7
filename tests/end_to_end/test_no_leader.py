"""No rank sends or receives more than its share, and only the ranks take part in a step."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, start
from tests.end_to_end.counting import MODEL, Bytes, StoreProxy, Wire
from tests.tiny import tiny_model, write_recipe
from torch.distributed import TCPStore

from leaderless.distributed.transport import Transport
from leaderless.observability.console import Display
from leaderless.planner import Cluster, Plan, Reshard, SyncWeights, flat, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo

MAX_SHARE = 1.2
"""Most bytes of a rank, as a multiple of the mean over those with the same part in an exchange."""
NUM_STEPS = 2
TOLD_BYTES = 4096
"""Most bytes per step for the types of an edge's columns, and for the log that rank 0 writes."""
NUM_WORKERS, REWARD_PROCESSES = 2, 1
START_S = 300.0
POOLS: dict[str, list[tuple[int, ...]]] = {"colocated": [(0, 1, 2, 3)], "disjoint": [(0, 1), (2, 3)]}
SETTINGS: dict[str, object] = {
    "batch.prompts_per_step": 16,
    "batch.responses_per_prompt": 8,
    "batch.micro_batch_tokens": 256,
    "algorithm.kl.coefficient": 0.1,
}


@dataclass(frozen=True)
class Account:
    """What one rank sent and received in a run.

    Attributes:
        exchanged: Bytes from peer to peer.
        agreed: Bytes of collectives that treat all ranks alike.
        broadcast: Bytes of broadcasts.
        begin: Time when all ranks were ready for the first step.
        end: Time when this rank finished its last step.
    """

    exchanged: Bytes
    agreed: Bytes
    broadcast: Bytes
    begin: float = 0
    end: float = 0


@dataclass(frozen=True)
class Observed:
    """A run of four ranks.

    Attributes:
        plan: Plan of the run.
        pools: Ranks that do the same work.
        accounts: Account of each rank.
        passed: Time and bytes of each message to and from the rendezvous store.
    """

    plan: Plan
    pools: list[tuple[int, ...]]
    accounts: list[Account]
    passed: list[tuple[float, int]]


def run_steps(recipe_file: str, store_port: int) -> Account:
    """Run whole steps on one rank, and count everything that it sends."""
    os.environ["MASTER_PORT"] = str(store_port)
    recipe = load_recipe(recipe_file).recipe
    place, wire = RankInfo.from_environment(), Wire()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        worker.parts.transport.world.sum(torch.zeros(1), "the start")
        begin = time.monotonic()
        with wire.counting():
            for _ in range(NUM_STEPS):
                worker.run_step()
        end = time.monotonic()
        worker.parts.transport.world.sum(torch.zeros(1), "the end")
    return Account(dict(wire.exchanged), dict(wire.agreed), dict(wire.broadcast), begin, end)


@pytest.fixture(scope="module", params=POOLS)
def observed(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    rest = ("reward", "old", "reference", "advantage", "policy")
    disjoint = {"rollout": {"ranks": "0-1"}, **{node: {"ranks": "2-3"} for node in rest}}
    layout = disjoint if request.param == "disjoint" else {}
    folder = tmp_path_factory.mktemp("leader")
    file = write_recipe(folder, tiny_model(), SETTINGS | {"layout": layout})
    recipe = load_recipe(file).recipe
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(4))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = StoreProxy(store.port)
    accounts = ranks.run(4, run_steps, str(file), proxy.port, init_group=False, deadline_s=600)
    proxy.close()
    yield Observed(plan, POOLS[request.param], accounts, proxy.passed)
    del store


def overloaded(loads: Mapping[int, float]) -> list[int]:
    """The ranks with more than their share.

    Args:
        loads: Bytes by rank, of ranks with the same part.
    """
    mean = sum(loads.values()) / len(loads)
    return [rank for rank, load in loads.items() if load > MAX_SHARE * mean]


def loads_of(accounts: Sequence[Bytes], ranks: Sequence[int], what: str, place: int) -> dict[int, float]:
    return {rank: accounts[rank].get(what, (0.0, 0.0))[place] for rank in ranks}


def test_no_rank_carries_more_than_its_share_of_an_edge(observed: Observed) -> None:
    exchanged = [account.exchanged for account in observed.accounts]
    seen = {what for account in exchanged for what in account}
    is_log = {what for what in seen if what == "the log" or what.startswith("the numbers of ranks")}
    for action in flat(observed.plan.schedule):
        if isinstance(action, Reshard | SyncWeights):
            what = f"edge {action.name}" if isinstance(action, Reshard) else f"weights of role '{action.role}'"
            sent = loads_of(exchanged, action.source_layout.ranks, what, 0)
            received = loads_of(exchanged, action.target_layout.ranks, what, 1)
            print(what, sent, received)
            assert sum(sent.values()) == sum(received.values()) > 0
            assert not overloaded(sent), f"{what}: {sent}"
            assert not overloaded(received), f"{what}: {received}"
            for rank, account in enumerate(exchanged):
                assert rank in action.source_layout or not account.get(what, (0, 0))[0]
                assert rank in action.target_layout or not account.get(what, (0, 0))[1]
            seen.discard(what)
    assert seen == is_log, "nothing else travels from peer to peer"
    for account in exchanged:
        assert sum(sum(account.get(what, (0, 0))) for what in is_log) <= NUM_STEPS * TOLD_BYTES


def test_no_rank_carries_more_than_its_share_of_a_collective(observed: Observed) -> None:
    agreed = [account.agreed for account in observed.accounts]
    trainers = observed.plan["policy"].layout
    assert all((MODEL in account) == (rank in trainers) for rank, account in enumerate(agreed)), "FSDP's count"
    for pool in observed.pools:
        for what in sorted({what for rank in pool for what in agreed[rank]}):
            for place in (0, 1):
                loads = loads_of(agreed, pool, what, place)
                print(what, place, loads)
                assert not overloaded(loads), f"{what}: {loads}"
    for account in observed.accounts:
        for what, (_, received) in account.broadcast.items():
            assert what.startswith("the columns of edge"), what
            assert received <= NUM_STEPS * TOLD_BYTES


def test_the_store_is_silent_from_the_first_step_to_the_last(observed: Observed) -> None:
    begin = min(account.begin for account in observed.accounts)
    end = max(account.end for account in observed.accounts)
    assert [what for what in observed.passed if begin <= what[0] <= end] == []
    assert sum(num_bytes for moment, num_bytes in observed.passed if moment < begin) > 0, "where ranks have met"


def speak_through_the_first() -> Account:
    """What a coordinator would do: receive everything, and send it out."""
    world, wire = Transport(torch.device("cpu"), timeout_s=60).world, Wire()
    payload, others = torch.zeros(1000, dtype=torch.uint8), list(range(1, world.size))
    with wire.counting():
        if world.rank == 0:
            world.exchange(dict.fromkeys(others, payload), others, "edge")
        else:
            world.exchange({0: payload}, [0], "edge")
    return Account(dict(wire.exchanged), dict(wire.agreed), dict(wire.broadcast))


def test_a_leader_would_be_found(ranks: RankPool) -> None:
    exchanged = [account.exchanged for account in ranks.run(4, speak_through_the_first)]
    for place in (0, 1):
        loads = loads_of(exchanged, range(4), "edge", place)
        assert loads == {0: 3 * 1008, 1: 1008, 2: 1008, 3: 1008}  # a length comes first
        assert overloaded(loads) == [0]


def wait_for_steps(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_S
    while not log.exists() or log.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def connections(process: psutil.Process) -> tuple[set[int], set[int]]:
    """The ports of a process's ends of its connections, and those of the other ends."""
    found = [connection for connection in process.net_connections(kind="inet") if connection.raddr]
    return {connection.laddr.port for connection in found}, {connection.raddr.port for connection in found}


def test_workers_talk_to_workers_and_nothing_else_runs_but_their_rewards(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"steps": 100_000, "run.reward_processes": REWARD_PROCESSES})
    process = start(tmp_path, "leaderless", "train", recipe, "--workers", NUM_WORKERS)
    launcher = psutil.Process(process.pid)
    try:
        wait_for_steps(tmp_path / "runs/tiny/metrics.jsonl", 2, process)
        children = launcher.children()
        workers = [child for child in children if child.children()]
        helpers = {worker.pid: worker.children() for worker in workers}
        everyone = launcher.children(recursive=True)
        lines = {child.pid: " ".join(child.cmdline()) for child in everyone}
        talks = {child.pid: connections(child) for child in (launcher, *everyone)}
        listening = [found for found in launcher.net_connections(kind="inet") if found.status == psutil.CONN_LISTEN]
    finally:
        process.send_signal(signal.SIGINT)
        finish(process)
    (nursery,) = [child for child in children if child not in workers]  # it forks them, as the tests have it
    assert len(workers) == NUM_WORKERS, lines
    for worker in workers:
        started = sorted(lines[helper.pid].rpartition(" -c ")[2].split()[1] for helper in helpers[worker.pid])
        # The tracker belongs to the standard library, and only knows names.
        assert started == ["multiprocessing.resource_tracker"] + ["multiprocessing.spawn"] * REWARD_PROCESSES
    assert len(everyone) == 1 + NUM_WORKERS * (1 + 1 + REWARD_PROCESSES), lines
    own_ends = {worker.pid: talks[worker.pid][0] for worker in workers}
    for worker in workers:
        others = set().union(*(ends for pid, ends in own_ends.items() if pid != worker.pid))
        assert talks[worker.pid][1], "workers talk"
        assert talks[worker.pid][1] <= others, "a worker talks to nobody but workers"
    for child in (launcher, nursery, *(helper for some in helpers.values() for helper in some)):
        assert talks[child.pid] == (set(), set()), lines.get(child.pid, "the launcher")
    assert not listening, "nobody can reach the launcher"
