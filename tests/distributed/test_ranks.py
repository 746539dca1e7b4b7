"""The harness itself: what it passes to functions, and what happens when they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankError, RankPool
from tests.forking import MODULES_VARIABLE


def rank_and_sum(start: int) -> tuple[int, int, str, float]:
    values = torch.tensor(start + dist.get_rank())
    dist.all_reduce(values)
    return int(os.environ["RANK"]), int(values), os.environ["WORLD_SIZE"], float(torch.rand(()))


def sum_in_a_group_of_its_own() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    values = torch.tensor(dist.get_rank())
    dist.all_reduce(values)
    return int(values)


def process_id() -> int:
    return os.getpid()


def fail_in_turn() -> None:
    dist.barrier()
    time.sleep(0 if dist.get_rank() == 1 else 0.4)
    raise ValueError(f"rank {dist.get_rank()} is wrong")


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def wait_for_nobody() -> None:
    time.sleep(60)


def return_something_unpicklable() -> object:
    return lambda: None


def start_a_child_and_fail(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(str(child.pid))
    raise ValueError("with a child")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def count_calls(path: str, number: int) -> list[int]:
    with Path(path).open("a") as calls:
        calls.write("x")
    return [number]


def test_equal_calls_are_made_once_and_nobody_changes_the_results_of_others(ranks: RankPool, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    for _ in range(2):
        results = ranks.once(2, count_calls, str(calls), 1)
        assert results == [[1], [1]]
        results[0].append(2)
    assert calls.read_text() == "xx", "once on each rank"
    assert ranks.once(1, count_calls, str(calls), 1) == [[1]]
    assert ranks.once(1, count_calls, str(calls), 2) == [[2]]
    assert calls.read_text() == "xxxx"


@pytest.mark.parametrize("world_size", [4, 3, 2, 1])
def test_every_rank_gets_its_number_and_a_process_group(ranks: RankPool, world_size: int) -> None:
    total = sum(10 + rank for rank in range(world_size))
    results = ranks.run(world_size, rank_and_sum, 10)
    assert [(rank, value, size) for rank, value, size, _ in results] == [
        (rank, total, str(world_size)) for rank in range(world_size)
    ]
    assert ranks.run(world_size, rank_and_sum, 10) == results  # the generators are also reset


def test_a_function_may_make_the_process_group_itself(ranks: RankPool) -> None:
    for _ in range(2):
        assert ranks.run(4, sum_in_a_group_of_its_own, init_group=False) == [6] * 4


def test_processes_are_kept_between_calls(ranks: RankPool) -> None:
    assert ranks.run(2, process_id) == ranks.run(4, process_id)[:2]


def test_only_functions_found_by_name_are_accepted(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="top level"):
        ranks.run(1, lambda: None)
    with pytest.raises(ValueError, match="1 to 4"):
        ranks.run(5, process_id)


def test_failures_name_the_rank_and_leave_working_ranks_behind(tmp_path: Path) -> None:
    pool = RankPool()
    try:
        before = pool.run(2, process_id)
        with pytest.raises(RankError, match=r"failed on rank 1 of 2 \(then on rank 0\):(?s:.*)rank 1 is wrong"):
            pool.run(2, fail_in_turn)
        wait_until_ended(before)
        with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*exit code 7"):
            pool.run(2, die_on_rank_one)
        pool.run(1, process_id)  # a busy machine may take a second to import this module
        with pytest.raises(RankError, match=r"(?s)did not return within 1 s on rank 0 of 1:.*in wait_for_nobody"):
            pool.run(1, wait_for_nobody, deadline_s=1)
        child = tmp_path / "child"
        with pytest.raises(RankError, match="with a child"):
            pool.run(1, start_a_child_and_fail, str(child))
        wait_until_ended([int(child.read_text())])
        with pytest.raises(RankError, match=r"(?i)pickle"):
            pool.run(1, return_something_unpicklable)
        last = pool.run(1, process_id)
    finally:
        pool.close()
    wait_until_ended(last)


SESSION = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it starts in the background
sys.path.insert(0, {root!r})
from tests.distributed.ranks import RankPool
from tests.distributed.test_ranks import process_id
if __name__ == "__main__":
    print(RankPool().run(1, process_id), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["kill", "interrupt"])
def test_no_process_outlives_the_session(tmp_path: Path, end: str) -> None:
    root = str(Path(__file__).parents[2])
    script = tmp_path / "session.py"
    script.write_text(SESSION.format(root=root))
    environment = os.environ | {MODULES_VARIABLE: "torch.distributed"}  # all that this session needs
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, str(script)], env=environment, **streams) as session:
        assert session.stdout is not None
        pids = [int(pid) for pid in session.stdout.readline().decode().strip("[]\n").split(",")]
        assert len(pids) == 1
        session.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
        wait_until_ended([*pids, session.pid])
