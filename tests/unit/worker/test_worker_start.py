"""How the process of a worker starts."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import MagicMock, Mock

import pytest
from tests.unit.recipes import make_recipe

from leaderless.base import versions
from leaderless.observability.console import Display
from leaderless.planner import Plan
from leaderless.run import worker
from leaderless.worker.build import process
from leaderless.worker.rank_info import RankInfo


def test_workers_look_for_no_garbage_among_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []
    monkeypatch.setattr(worker, "import_module", lambda name: imported.append((name, gc.isenabled())))
    made = [object, []]
    assert any(one is made for one in gc.get_objects())
    worker._import_for_good()
    assert imported == [("leaderless.worker.build.process", False)]
    assert gc.isenabled()
    assert not any(one is made for one in gc.get_objects()), "what is there is never inspected again"


def test_a_run_names_packages_that_are_too_old_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "requires", lambda _: ["transformers>=999", "numpy>=1"])
    monkeypatch.setattr(versions, "version", lambda _: "5.1.0")
    monkeypatch.setattr(process, "RewardPool", MagicMock())
    monkeypatch.setattr(process, "join_workers", Mock(side_effect=ConnectionError))
    shown = list[str]()
    display = cast("Display", SimpleNamespace(is_shown=True, say=shown.append))
    for local_rank in (0, 1):
        place, recipe = RankInfo(local_rank, 2, local_rank, 2), make_recipe(run={"directory": str(tmp_path)})
        with ExitStack() as stack, pytest.raises(ConnectionError):
            process._join(recipe, cast("Plan", SimpleNamespace(instances=())), place, display, stack)
        (warning,) = shown
        assert warning == f"this run may fail: transformers is 5.1.0, but must be >=999: {versions.REMEDY}"
