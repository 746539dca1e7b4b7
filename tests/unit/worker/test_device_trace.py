"""The trace of a device is written whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.profiler import ProfilerActivity

from leaderless.worker import device_sharing as module
from leaderless.worker.device_sharing import device_trace


def test_operations_of_the_cpu_are_written_where_there_is_no_gpu(tmp_path: Path) -> None:
    path, asked = tmp_path / "trace/device-rank-0.json", list[Path]()

    @contextmanager
    def may_fail(what: Path) -> Iterator[None]:
        asked.append(what)
        yield

    with device_trace(path, torch.device("cpu"), may_fail):
        torch.ones(3, 3) @ torch.ones(3, 3)
        assert not path.exists()
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert asked == [path]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_step_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "device-rank-0.json"
    with pytest.raises(KeyError), device_trace(path, torch.device("cpu"), lambda _: nullcontext()):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_gpu_is_waited_for_before_its_trace_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its profiler is a stand-in that notes what happens."""
    path, notes = tmp_path / "device-rank-0.json", list[str]()

    class Profile:
        def __init__(self, activities: list[ProfilerActivity]) -> None:
            assert activities == [ProfilerActivity.CUDA]

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            notes.append("ended")

        def export_chrome_trace(self, name: str) -> None:
            Path(name).write_text("{}")

    monkeypatch.setattr(module, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=lambda _: notes.append("waited")))
    with device_trace(path, torch.device("cuda", 1), lambda _: nullcontext()):
        notes.append("computed")
    assert notes == ["computed", "waited", "ended"]
    torch.cuda.synchronize.assert_called_once_with(torch.device("cuda", 1))
    assert path.read_text() == "{}"
