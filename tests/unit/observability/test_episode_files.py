"""The files of the journal of episodes: written in a thread, added to, thinned and forgotten."""

from __future__ import annotations

import json
import resource
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from leaderless.observability.episode_files import EpisodeJournal, episode_files, kept, read_episode_file
from leaderless.observability.run_directory import RunDirectory


def test_rounds_of_a_step_follow_each_other_in_one_file(tmp_path: Path) -> None:
    journal = EpisodeJournal(RunDirectory(tmp_path), 3, 10)
    for number in (1, 2):
        journal.write("step", 7, "played", lambda number=number: [f'{{"id":{number}}}'])
    journal.close()
    (file,) = episode_files(tmp_path / "episodes")
    assert file.path == tmp_path / "episodes/step-000007/played.rank-3.jsonl.gz"
    assert [line["id"] for line in read_episode_file(file.path)] == [1, 2]


def test_a_disk_that_is_full_does_not_end_the_run(tmp_path: Path) -> None:
    directory, said = RunDirectory(tmp_path), list[str]()
    (tmp_path / "episodes").write_text("in the way")
    journal = EpisodeJournal(directory, 0, 10)
    journal.write("step", 1, "played", lambda: ["{}"])
    with pytest.raises(OSError, match="episodes"):
        journal.close()
    directory.say = said.append
    journal.write("step", 1, "played", lambda: ["{}"])
    journal.close()
    assert len(said) == 1
    assert "training continues" in said[0]


def test_what_does_not_fit_on_the_disk_leaves_the_rounds_before_and_after_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.say = lambda _: None
    path = tmp_path / "episodes/step-000001/played.rank-0.jsonl.gz"

    def write(number: int) -> None:
        journal = EpisodeJournal(directory, 0, 10)
        journal.write("step", 1, "played", lambda: [json.dumps({"id": number, "noise": Random(1).random()})])
        journal.close()

    write(1)
    first, limits = path.stat(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.st_size + 30, limits[1]))
    try:
        write(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(3)
    assert [line["id"] for line in read_episode_file(path)] == [1, 3]
    assert path.stat().st_ino == first.st_ino, "what was written before is not written again"


def test_no_journal_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    journal = EpisodeJournal(RunDirectory(tmp_path), 0, 0)
    journal.write("step", 1, "played", lambda: ["{}"])
    journal.close()
    assert not (tmp_path / "episodes").exists()


def test_the_newest_steps_are_kept_and_earlier_ones_evenly_spread() -> None:
    found: set[int] = set()
    for step in range(1, 10_001):
        found = kept("step", found | {step}, 100, step)
        assert len(found) <= 202
    earlier = sorted(step for step in found if step <= 9_900)
    assert earlier[0] == 1
    assert {after - before for before, after in pairwise(earlier)} == {128}
    assert kept("evaluation", range(0, 100, 10), 2, 90) == {60, 70, 80, 90}


def test_each_rank_drops_its_own_files(tmp_path: Path) -> None:
    journals = [EpisodeJournal(RunDirectory(tmp_path), rank, 1) for rank in (0, 1)]
    for step in (1, 2, 3):
        for journal in journals[: 2 if step == 1 else 1]:
            journal.write("step", step, "played", lambda: ["{}"])
    for journal in journals:
        journal.close()
    assert [(file.step, file.rank) for file in episode_files(tmp_path / "episodes")] == [(1, 0), (1, 1), (3, 0)]
    journals[0].forget(0, 0, lambda rank: rank == 0)
    assert [(file.step, file.rank) for file in episode_files(tmp_path / "episodes")] == [(1, 1)]
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["step-000001"]
