"""What a run of the benchmark for GPUs leaves behind if it is stopped, or if something in it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu import conftest

from leaderless.rollout.paged_engine import PagedOptions

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # as when they are run
from benchmarks import gpu

import gpu_machine
from gpu_machine import PRESETS, Machine
from gpu_report import rows
from gpu_rollout import generation

OUTPUT = """
collected 5 items
tests/gpu/test_paged.py::test_one[a b]
FAILS tests/gpu/test_paged.py::test_one[a b]: RuntimeError: out of luck / FAILED
tests/gpu/test_paged.py::test_one[a b] FAILED                            [ 20%]
tests/gpu/test_paged.py::test_two PASSED                                 [ 40%]
tests/gpu/test_cuda.py::test_three SKIPPED (one GPU)                     [ 60%]
FAILS tests/gpu/test_cuda.py::test_four: KeyError: 'x'
tests/gpu/test_cuda.py::test_four ERROR                                  [ 80%]
tests/gpu/test_cuda.py::test_five """
COUNTS = {"passed": 1, "failed": 1, "errors": 1, "skipped": 1}


def test_results_of_tests_are_known_before_their_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(command: list[str], limit_s: float) -> tuple[int, str]:
        files = [Path(part).name for part in command if part.endswith(".py")]
        assert files[0] == "test_paged.py", "kernels and the engine first"
        assert {path.name for path in (Path(gpu.__file__).parents[1] / "tests/gpu").glob("test_*.py")} == {*files}
        raise gpu.StoppedError(f"stopped after {limit_s:g} s", OUTPUT)

    monkeypatch.setattr(gpu, "output_of", stop)
    monkeypatch.setattr(gpu, "LOG", tmp_path / "runs/tests.log")
    found = gpu.run_tests(150)
    assert found.items() >= COUNTS.items()
    assert found["failures"] == [
        "FAILS tests/gpu/test_paged.py::test_one[a b]: RuntimeError: out of luck / FAILED",
        "FAILS tests/gpu/test_cuda.py::test_four: KeyError: 'x'",
    ]
    assert found["problem"] == "stopped after 150 s"
    assert (tmp_path / "runs/tests.log").read_text() == OUTPUT
    assert rows({"parts": {"tests": found}}) == [
        ("tests passed, failed, skipped", "1, 2, 1"),
        ("tests is not complete", "stopped after 150 s"),
    ]
    monkeypatch.setattr(gpu, "output_of", lambda *_: (4, "no module named pytest"))
    with pytest.raises(RuntimeError, match="exit code 4: no module named pytest"):
        gpu.run_tests(150)


def test_a_reason_is_printed_as_soon_as_a_test_fails() -> None:
    class Terminal:
        def __init__(self) -> None:
            self.lines = list[str]()

        def write_line(self, line: str) -> None:
            self.lines.append(line)

    class Report:
        failed, nodeid, longreprtext = True, "tests/gpu/test_cuda.py::test_four", ">   x\nE   KeyError: 'x'\nE   more\n"

    terminal = Terminal()
    reasons = conftest.Reasons(terminal)  # type: ignore[arg-type]
    reasons.pytest_runtest_logreport(Report)  # type: ignore[arg-type]
    assert terminal.lines == ["\nFAILS tests/gpu/test_cuda.py::test_four: KeyError: 'x' / more"]


@pytest.mark.parametrize("end", ["sleep 60", "exit 3"])
def test_a_part_that_is_stopped_keeps_what_it_has_measured(end: str) -> None:
    said = """echo 'MEASURED {"speed": 1}'; echo 'MEASURED {"speed": 2}'"""
    answer = json.loads(gpu.answer_of(["sh", "-c", f"{said}; {end}"], 1))
    assert answer["speed"] == 2
    assert answer["problem"].startswith("stopped after 1 s" if "sleep" in end else "exit code 3")
    assert json.loads(gpu.answer_of(["sh", "-c", said], 10)) == {"speed": 2}
    cut_off = f"""{said}; echo 'MEASURED {{"spee'"""
    assert json.loads(gpu.answer_of(["sh", "-c", f"{cut_off}; {end}"], 1))["speed"] == 2
    with pytest.raises(TimeoutError if "sleep" in end else RuntimeError):
        gpu.answer_of(["sh", "-c", end], 1)


def test_each_way_to_generate_is_said_as_soon_as_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    generation(Machine(torch.device("cpu"), PRESETS["tiny"]))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(gpu.MARK)]
    lines = [json.loads(line.removeprefix(gpu.MARK)) for line in said]
    assert [len(line["tokens_per_s"]) for line in lines] == [1, 2, 3, 4]
    assert lines[0]["preset"]["layers"] == 2


@pytest.mark.parametrize("name", PRESETS)
def test_the_pool_of_the_engine_leaves_room_on_the_smallest_gpu_of_a_preset(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chosen = list[PagedOptions]()
    monkeypatch.setattr(gpu_machine, "PagedEngine", lambda *args: chosen.append(args[-1]))
    preset = PRESETS[name]
    Machine(torch.device("cpu"), preset).native(None, "pages")  # type: ignore[arg-type]
    (options,) = chosen
    per_token = 2 * preset.layers * preset.key_heads * (preset.hidden // preset.heads) * 2
    assert options.pool_tokens >= preset.prompts * (preset.prompt_tokens + 8 * preset.response_tokens)
    assert options.pool_tokens * per_token <= 0.3 * max(1, preset.least_gib) * 2**30


def test_the_quickstart_runs_where_there_was_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = tmp_path / "runs/quickstart-base"
    base.mkdir(parents=True)
    (tmp_path / "runs/quickstart").mkdir()
    (tmp_path / "runs/quickstart/metrics.jsonl").write_text('{"evaluation/accuracy": 0.5}\n')
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "output_of", lambda command, _: (int("export" in command and base.exists()), "not empty"))
    assert gpu.run_quickstart("cuda", 60)["accuracy"] == [0.5, 0.5]
