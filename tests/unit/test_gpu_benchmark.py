"""The benchmark for GPUs, tried with a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import PARTS, PRESETS, Machine

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))  # as when it is run
from generate_gpu import goals


def test_every_part_is_kept_as_soon_as_it_is_done(tmp_path: Path) -> None:
    path, machine = tmp_path / "gpu.json", Machine(torch.device("cpu"), PRESETS["tiny"])

    def run(part: str, limit_s: float) -> dict[str, object]:
        assert part not in json.loads(path.read_text())["parts"] if path.exists() else True
        assert 0 < limit_s <= gpu.LIMITS_S[part]
        if part == "tests":
            return {"passed": 3, "failed": 0, "errors": 0, "skipped": 1, "failures": []}
        if part == "quickstart":
            raise RuntimeError("exit code 1: no | wheels")
        result = PARTS[part](machine)
        return json.loads(json.dumps(result | {"preset": gpu_parts.asdict(machine.preset)}))

    results = gpu.measure(list(gpu.LIMITS_S), run, path, 480)
    assert json.loads(path.read_text()) == results
    assert set(results["parts"]) == set(gpu.LIMITS_S) == {*PARTS, "tests", "quickstart"}
    assert results["parts"]["agreement"]["key_bias"]["0"]["mean"] < 1e-4
    assert results["parts"]["agreement"]["key_bias"]["50"]["mean"] < 1e-3
    assert results["parts"]["training"]["tokens"] <= PRESETS["tiny"].pass_tokens
    assert results["parts"]["training"]["planned_bytes"] > 0
    assert results["parts"]["decoding"]["steps"]["no graphs"]["ms_per_step"] > 0
    table = gpu.table(results)
    assert table.count("| weights from 1 GPUs to ") == 2
    assert "| quickstart failed | exit code 1: no / wheels |" in table
    assert "transformers.generate" in table
    again = gpu.measure(["quickstart"], lambda *_: {"seconds": {"a": 2.0}, "accuracy": [0.25, 0.5]}, path, 480)
    assert "| quickstart | 2 s, accuracy 25.0% → 50.0% |" in gpu.table(again)


def test_a_part_that_takes_too_long_is_stopped_and_the_others_have_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="stopped after 1 s; it said last: begun"):
        gpu.output_of(["sh", "-c", "echo begun; sleep 60"], 1)  # Python may take a second to start
    results = gpu.measure(["speeds"], lambda *_: {}, tmp_path / "gpu.json", 5)
    assert results["parts"]["speeds"]["error"] == "no time was left"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nAssertionError: Torch not compiled with CUDA enabled\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        SystemExit, match=r"nothing was measured: this machine has no CUDA GPU .* not compiled with CUDA"
    ):
        gpu.check_device("cuda")
    gpu.check_device("cpu")


def test_goals_are_shown_with_what_was_measured_of_them() -> None:
    parts = {
        "speeds": {"flops": 8e14},
        "training": {"model_flops": 4e14, "forward_backward_s": 2.0, "compiled_forward_backward_s": 1.0},
        "generation": {"tokens_per_s": {"pages": 30.0, "transformers": 90.0}, "bound_tokens_per_s": 100.0},
        "weights": {"bytes": 3.04e9, "seconds": {"native": 0.05, "apart": 0.1}, "ranks": 1},
    }
    page = goals(parts)
    assert "| 40 % | 50% |" in page
    assert "512 sequences | 60 % | 30% |" in page
    assert "| 0.5 s | native 0.25 s, in another process 0.50 s without what vLLM adds |" in page
    assert goals({"training": {"error": "out of memory"}}).count("not measured") == 5
