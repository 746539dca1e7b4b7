"""The profiled step of a run on a real GPU: its kernels, its copies, and where the host waits."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from leaderless.worker.device_sharing import device_trace

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # as when it is run
from gpu_timeline import events_of, operations_of, summary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_kernels_copies_and_waits_are_recorded(tmp_path: Path) -> None:
    device, path = torch.device("cuda", 0), tmp_path / "device-rank-0.json"
    square = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with device_trace(path, device, lambda _: nullcontext()):
        for _ in range(5):
            square = torch.softmax(square @ square, -1)
        square.cpu()
    found = summary(operations_of(events_of(path)))
    print({name: value for name, value in found.items() if name != "lanes"})
    assert {"products", "other operations", "copies", "starts work", "waits"} <= found["kinds"].keys()
    assert "host" in found["lanes"]
    assert any(lane.startswith("stream ") for lane in found["lanes"])
    assert 0 < found["busy"] <= 1
    assert found["operations"] >= 11
