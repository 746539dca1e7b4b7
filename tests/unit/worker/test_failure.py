"""Of all failures of a run, the user sees the one that caused the others."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from leaderless.config import RecipeError
from leaderless.distributed.errors import CollectiveError
from leaderless.worker.supervision.failure import FOLDER_VARIABLE, WorkerFailure, first_failure, reported_failures


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a launcher reads."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def fail(rank: int, error: BaseException) -> int:
    """The exit code of a worker that ends with an error."""
    with pytest.raises(SystemExit) as ended, reported_failures(rank):
        raise error
    assert isinstance(ended.value.code, int)
    return ended.value.code


def the_first(folder: Path) -> WorkerFailure:
    failure = first_failure(folder)
    assert failure is not None
    return failure


def test_the_first_failure_is_found_among_its_echoes(folder: Path) -> None:
    assert first_failure(folder) is None
    # A rank may notice that another is gone before that one has written the reason.
    assert fail(0, CollectiveError("rank 0 waited for rewards with ranks [1, 2]")) == 1
    assert fail(2, KeyError("missing")) == 1
    assert fail(1, ValueError("later")) == 1
    first = the_first(folder)
    assert (first.rank, first.kind, first.message) == (2, "error", "KeyError: 'missing'")
    assert "raise error" in first.trace
    assert "KeyError: 'missing'" in first.trace


def test_where_only_peers_were_lost_that_is_the_failure(folder: Path) -> None:
    fail(1, RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"))
    fail(0, CollectiveError("rank 0 waited"))
    assert (the_first(folder).rank, the_first(folder).kind) == (1, "lost_peers")


def test_a_failure_that_the_user_has_to_correct_is_marked(folder: Path) -> None:
    assert fail(1, RecipeError.at("data", "all rows are overlong")) == 2
    assert (the_first(folder).kind, the_first(folder).message) == ("recipe", "data: all rows are overlong")


def test_a_full_disk_comes_with_a_remedy_and_notes_with_the_place(folder: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    error.add_note("at step 3, in samples, on rank 0")
    fail(0, error)
    first = the_first(folder)
    assert first.kind == "storage"
    assert "(at step 3, in samples, on rank 0): make room, or name another run.directory" in first.message


def test_an_orderly_end_is_no_failure(folder: Path) -> None:
    with pytest.raises(SystemExit), reported_failures(0):
        raise SystemExit(0)
    with reported_failures(0):
        pass
    assert first_failure(folder) is None


def test_without_a_launcher_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(KeyError), reported_failures(0):
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []
