"""A stall is one only if no rank moves, and the named rank is the one that the others wait for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from leaderless.distributed.activity import Activity
from leaderless.observability.run_directory import RunDirectory
from leaderless.worker.supervision import heartbeat
from leaderless.worker.supervision.failure import FOLDER_VARIABLE, first_failure
from leaderless.worker.supervision.heartbeat import Stall, Status, Watchdog, end_stalled, find_culprit

TIMEOUT_S = 0.6
STATUS = Status(0, 3, 2, "policy", 40.0, "", "")


@pytest.mark.parametrize(
    ("statuses", "culprit"),
    [
        ([replace(STATUS, waiting_for="rows"), replace(STATUS, rank=1, doing="reward")], 1),
        ([replace(STATUS, waiting_for="rows"), replace(STATUS, rank=1, waiting_for="rows", place=1)], 1),
        ([replace(STATUS, step=4), replace(STATUS, rank=1)], 1),
        ([replace(STATUS, idle_s=50.0), replace(STATUS, rank=1)], 0),
    ],
    ids=["does not wait", "is behind in the chain", "is a step behind", "has stood longest"],
)
def test_the_culprit_is_the_rank_that(statuses: list[Status], culprit: int) -> None:
    stall = find_culprit(statuses, [])
    assert stall.rank == culprit
    assert stall.cause == str(statuses[culprit])


def test_a_rank_that_does_not_answer_is_the_culprit() -> None:
    stall = find_culprit([STATUS], [2])
    assert (stall.rank, stall.step) == (2, 3)
    assert "rank 2 does not answer" in stall.cause


def test_a_status_says_where_and_for_how_long() -> None:
    status = replace(STATUS, rank=1, doing="reward", function="examples.x:slow")
    assert str(status) == "rank 1 has not moved for 40 s in reward, in user function examples.x:slow, at step 3"


@dataclass
class Ranks:
    """Two ranks in one process, each with its watchdog."""

    folder: Path
    store: Store = field(default_factory=dist.HashStore)
    activities: list[Activity] = field(default_factory=lambda: [Activity(), Activity()])
    stalls: list[tuple[int, bool, Stall]] = field(default_factory=list)
    watching: ExitStack = field(default_factory=ExitStack)

    def watch(self, rank: int) -> None:
        def note(stall: Stall, is_reporter: bool, rank: int) -> None:
            self.stalls.append((rank, is_reporter, stall))

        transport = SimpleNamespace(rank=rank, world=SimpleNamespace(ranks=(0, 1)), store=lambda: self.store)
        stacks = self.folder / "errors" / f"stacks-rank-{rank}.txt"
        watchdog = Watchdog(self.activities[rank], transport, TIMEOUT_S, stacks, partial(note, rank=rank))
        self.watching.enter_context(watchdog)

    def wait(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        return condition()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    with ranks.watching:
        yield ranks


def test_both_ranks_hear_of_a_stall_and_write_their_stacks(ranks: Ranks) -> None:
    ranks.activities[0].begin(2, "policy", 5)
    ranks.activities[1].begin(2, "reward", 3)
    ranks.watch(0)
    ranks.watch(1)
    with ranks.activities[0].waiting("rows"):
        assert ranks.wait(lambda: len(ranks.stalls) >= 2)
    assert sorted(is_reporter for _, is_reporter, _ in ranks.stalls[:2]) == [False, True], "one reports for both"
    assert {stall.rank for _, _, stall in ranks.stalls} == {1}
    assert "in reward" in ranks.stalls[0][2].cause
    assert "in user function" in ranks.stalls[0][2].cause, "this very test"
    for rank in (0, 1):
        text = (ranks.folder / f"errors/stacks-rank-{rank}.txt").read_text()
        assert f"rank {rank} has not moved" in text
        assert "test_heartbeat.py" in text


def test_a_rank_that_waits_for_one_that_moves_is_no_stall(ranks: Ranks) -> None:
    ranks.watch(0)
    ranks.watch(1)
    end = time.monotonic() + 4 * TIMEOUT_S
    with ranks.activities[0].waiting("rows"):
        while time.monotonic() < end:
            ranks.activities[1].beat()
            time.sleep(TIMEOUT_S / 30)
    assert ranks.store.check(["stall/0/verdict"]), "rank 0 has asked"
    assert json.loads(ranks.store.get("stall/0/verdict"))["stall"] is None
    assert ranks.stalls == []
    ranks.watching.close()
    assert not (ranks.folder / "errors").exists(), "no empty files are left"


def test_a_rank_whose_interpreter_is_stuck_is_named_by_the_others(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "ANSWER_S", 0.2)
    ranks.watch(0)  # and none for rank 1
    assert ranks.wait(lambda: bool(ranks.stalls))
    assert ranks.stalls[0][2].rank == 1


def test_a_debugger_is_no_stall(ranks: Ranks) -> None:
    ranks.watch(0)
    (watchdog,) = (thread for thread in threading.enumerate() if thread.name == "watchdog")
    assert watchdog.is_alive()
    seen: list[float] = []

    transport = SimpleNamespace(rank=0, world=SimpleNamespace(ranks=(0,)), store=lambda: ranks.store)
    other = Watchdog(Activity(), transport, 1e-9, ranks.folder / "x", print)  # of the thread that makes it

    def look() -> None:
        seen.append(other.status().idle_s)

    # The main thread is inside a function of a debugger while another thread looks at it.
    source = "def stop(thread):\n    thread.start()\n    thread.join()\n"
    module = {"__name__": "pdb"}
    exec(compile(source, "pdb.py", "exec"), module)
    module["stop"](threading.Thread(target=look))  # type: ignore[operator]
    assert seen == [0.0]


@pytest.mark.parametrize("is_reporter", [True, False])
def test_a_stalled_process_says_why_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_reporter: bool
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(heartbeat, "LAST_WORDS_S", 0.0)
    monkeypatch.setattr(heartbeat.os, "_exit", codes.append)
    directory, stall = RunDirectory(tmp_path), Stall(1, "rank 1 has not moved", 7)
    end_stalled(stall, is_reporter, directory=directory, rank=0)
    assert capsys.readouterr().err.startswith("error rank 1 has not moved; the stacks") is is_reporter, "no launcher"
    assert directory.events.exists() is is_reporter
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "launcher"))
    end_stalled(stall, is_reporter, directory=directory, rank=0)
    assert capsys.readouterr().err == "", "the launcher says it"
    failure = first_failure(tmp_path / "launcher")
    assert failure is not None
    assert (failure.kind, failure.rank) == (("stall", 1) if is_reporter else ("lost_peers", 0))
    assert codes == [1, 1]


def test_an_activity_describes_what_is_done_and_what_is_waited_for() -> None:
    activity = Activity()
    assert str(activity) == "starting"
    activity.begin(3, "rollout", 1)
    assert str(activity) == "step 3: rollout"
    activity.show("step 3: rollout", 0.5)
    with activity.waiting("window 1"):
        assert str(activity) == "step 3: rollout 50%, waiting for window 1"
    activity.show("evaluating", "1/8")
    activity.part = ", pass 2/4"
    assert str(activity) == "evaluating 1/8, pass 2/4"
    activity.begin(4, "policy", 2)
    assert str(activity) == "step 4: policy"


def test_a_beat_costs_next_to_nothing() -> None:
    activity, count = Activity(), 100_000
    begin = time.perf_counter()
    for _ in range(count):
        activity.beat()
    assert (time.perf_counter() - begin) / count < 20e-6, "seconds; a decoding step takes a hundred times as long"


def test_a_folder_that_another_rank_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its own two steps, each of two ranks may find the folder there, and then gone."""
    transport = SimpleNamespace(rank=0, world=SimpleNamespace(ranks=(0,)), store=lambda: None)
    path, made = tmp_path / "errors/stacks", list[Path]()
    mkdir = Path.mkdir

    def removed(self: Path, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self, mode, parents, exist_ok)
        made.append(self)
        if len(made) == 1:
            self.rmdir()
        if len(made) == 2:
            raise FileExistsError(str(self))

    monkeypatch.setattr(Path, "mkdir", removed)
    with Watchdog(Activity(), transport, TIMEOUT_S, path, print):  # type: ignore[arg-type]
        assert path.exists()
    assert len(made) == 3
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError), Watchdog(Activity(), transport, TIMEOUT_S, path, print):  # type: ignore[arg-type]
        pass
