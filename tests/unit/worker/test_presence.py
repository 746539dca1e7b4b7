"""What a rank is doing stands in the folder of its run, where it looks for what others ask of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from leaderless.base.devices import DeviceUse
from leaderless.distributed.activity import Activity
from leaderless.observability.run_directory import RunDirectory
from leaderless.worker.supervision.supervised import RANKS_PER_S, Presence


def presence(folder: Path, activity: Activity, every_s: float = 0.01, look=lambda: None, ranks: int = 1) -> Presence:
    return Presence(RunDirectory(folder), (0, ranks), activity, every_s, lambda: DeviceUse(2, 8, 37.5), look)


def wait(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise TimeoutError


def test_a_rank_says_what_it_does_until_it_ends(tmp_path: Path) -> None:
    activity, path = Activity(), tmp_path / "live/rank-0.json"
    with presence(tmp_path, activity):
        wait(path.exists)
        activity.begin(7, "rollout", 1)
        with activity.waiting("the rows of rank 3"):
            wait(lambda: json.loads(path.read_text())["waiting_for"])
            seen = json.loads(path.read_text())
    assert (seen["step"], seen["doing"], seen["waiting_for"]) == (7, "rollout", "the rows of rank 3")
    assert (seen["device_bytes"], seen["device_total_bytes"], seen["device_percent"]) == (2, 8, 37.5)
    assert seen["host_bytes"] > 0
    assert seen["idle_s"] >= 0
    assert not path.parent.exists(), "nothing is left when all ranks have ended"


def test_a_rank_that_cannot_write_goes_on(tmp_path: Path) -> None:
    (tmp_path / "live").write_text("a file where the folder should be")
    with presence(tmp_path, Activity()) as one:
        assert one.status()["rank"] == 0
    assert (tmp_path / "live").read_text() == "a file where the folder should be"


def test_nothing_is_written_where_this_is_turned_off(tmp_path: Path) -> None:
    with presence(tmp_path, Activity(), every_s=0.0):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ranks", "expected"), [(2, 1.0), (1024, 1024 / RANKS_PER_S)])
def test_many_ranks_write_more_seldom(tmp_path: Path, ranks: int, expected: float) -> None:
    assert presence(tmp_path, Activity(), every_s=1.0, ranks=ranks).status()["every_s"] == expected


def test_a_rank_that_cannot_write_still_looks_for_what_is_asked_of_it(tmp_path: Path) -> None:
    asked = threading.Event()
    (tmp_path / "live").write_text("as on a full disk, nothing can be written here")
    with presence(tmp_path, Activity(), look=asked.set):
        assert asked.wait(30)
