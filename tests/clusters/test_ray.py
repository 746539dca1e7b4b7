"""Machines of a real Ray cluster, of several nodes on this machine."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.cli import ROOT
from tests.tiny import tiny_model, write_recipe

ray = pytest.importorskip("ray", reason="Ray is in an environment of its own: make test-clusters")

from leaderless.run.clusters.ray_cluster import Machine, MachineRequest, place, run_machines  # noqa: E402

REWARD = """
import time

def grade(sample):
    time.sleep(0.05)
    return float(len(sample.response))
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without room for workers, and two nodes."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.nodes_for_machines = [made.add_node(num_cpus=1) for _ in range(2)]  # type: ignore[attr-defined]
    made.connect()
    yield made
    ray.shutdown()
    made.shutdown()


def wish(folder: Path, port: int, steps: int = 12, **changes: Any) -> MachineRequest:
    (folder / "slow.py").write_text(REWARD)
    settings = {"reward": {"slow:grade": 1.0}, "steps": steps, "run.reward_processes": 1, "run.grace_s": 30}
    settings |= {"batch.prompts_per_step": 4, "checkpoint.every_steps": 4}
    recipe = write_recipe(folder, tiny_model(), settings)
    setup = (f"export PYTHONPATH={ROOT / 'src'}:{ROOT}:{folder}", f"cd {folder}")
    given = {"smallest": 1, "largest": 2, "workers": 1, "port": port, "setup": setup, "placement_timeout_s": 60}
    return MachineRequest((str(recipe),), **(given | changes))  # type: ignore[arg-type]


def free_port() -> int:
    import socket

    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def steps_of(folder: Path) -> list[int]:
    log = folder / "runs/tiny/metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def started(wanted: MachineRequest) -> tuple[threading.Thread, threading.Event, list[int]]:
    stopped, codes = threading.Event(), []
    thread = threading.Thread(target=lambda: codes.append(run_machines(wanted, stopped)), daemon=True)
    thread.start()
    return thread, stopped, codes


def wait_for(folder: Path, count: int, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while len(steps_of(folder)) < count:
        assert time.monotonic() < end, steps_of(folder)
        time.sleep(0.2)


def test_a_run_on_two_nodes_is_done(cluster: Any, tmp_path: Path) -> None:
    assert run_machines(wish(tmp_path, free_port()), threading.Event()) == 0
    assert steps_of(tmp_path) == list(range(1, 13))
    assert len(list((tmp_path / "runs/tiny/trace").glob("rank-*.json"))) == 2, "both workers have trained"


def test_a_recipe_that_is_wrong_ends_the_job_at_once(cluster: Any, tmp_path: Path) -> None:
    wanted = wish(tmp_path, free_port())
    wrong = MachineRequest((*wanted.recipe, "batch.prompts=3"), 1, 2, 1, setup=wanted.setup, port=wanted.port)
    begin = time.monotonic()
    assert run_machines(wrong, threading.Event()) == 2
    assert time.monotonic() - begin < 120


def test_the_others_continue_when_a_node_is_lost_and_another_joins(cluster: Any, tmp_path: Path) -> None:
    wanted = wish(tmp_path, free_port(), steps=60)
    thread, _, codes = started(wanted)
    wait_for(tmp_path, 6)
    lost = _node_of_last_machine(cluster)
    cluster.remove_node(lost, allow_graceful=False)
    reached = len(steps_of(tmp_path))
    wait_for(tmp_path, reached + 4)
    cluster.add_node(num_cpus=1)
    thread.join(400)
    assert codes == [0]
    assert steps_of(tmp_path) == list(range(1, 61))


def _node_of_last_machine(cluster: Any) -> Any:
    """The node of the machine at which the others do not meet."""
    (group,) = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    return next(node for node in cluster.nodes_for_machines if node.node_id == group["bundles_to_node_id"][1])


def test_a_run_that_is_stopped_saves_its_step(cluster: Any, tmp_path: Path) -> None:
    thread, stopped, codes = started(wish(tmp_path, free_port(), steps=500))
    wait_for(tmp_path, 6)
    stopped.set()
    thread.join(120)
    assert codes == [143]
    state = sorted((tmp_path / "runs/tiny/checkpoints").iterdir())[-1]
    assert int("".join(filter(str.isdigit, state.name))) == steps_of(tmp_path)[-1]


def test_too_small_a_cluster_is_named(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no room for 3 machines with .*'CPU': 1.0.*STRICT_SPREAD.*ray status"):
        place(wish(tmp_path, 1, smallest=3, largest=3, placement_timeout_s=2), threading.Event())
    group = place(wish(tmp_path, 1, smallest=1, largest=3, placement_timeout_s=2), threading.Event())
    assert group is not None
    assert group.bundle_count == 2, "as many as there is room for"


def test_a_command_ends_with_its_machine(tmp_path: Path) -> None:
    machine = Machine()
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); time.sleep(60)"
    )
    threading.Timer(1.0, machine.stop).start()
    assert machine.run([sys.executable, "-c", code]) in {9, 143}
    assert Machine().run(["/bin/sh", "-c", "kill -9 $$"]) == 137
