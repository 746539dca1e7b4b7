"""The benchmark for GPUs, tried with a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # as when they are run
from benchmarks import gpu, published

import gpu_machine
import gpu_parts
import gpu_published
import gpu_quickstart
import gpu_report
import gpu_timeline
from gpu_machine import MARK, PRESETS, Machine
from gpu_parts import MODULES, part_named

SAID: dict[str, str] = {}
"""Output of each part, by name."""


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Any]]:
    """What each part gives, except for those that have tests of their own."""
    machine, found = Machine(torch.device("cpu"), PRESETS["tiny"]), {}
    for name in MODULES:
        if name not in {"quickstart", "timeline"} and not name.startswith(published.PREFIX):
            with redirect_stdout(StringIO()) as said:
                found[name] = json.loads(json.dumps(part_named(name)(machine) | {"preset": asdict(machine.preset)}))
            SAID[name] = said.getvalue()
    return found


def test_parts_measure_what_the_page_shows(parts: dict[str, dict[str, Any]]) -> None:
    assert parts["agreement"]["key_bias"]["0"]["mean"] < 1e-4
    assert parts["agreement"]["key_bias"]["50"]["mean"] < 1e-3
    assert parts["training"]["tokens"] <= PRESETS["tiny"].pass_tokens
    assert parts["decoding"]["steps"].keys() == {"pages", "slots"}
    assert all(steps["ms_per_step"] > 0 for steps in parts["decoding"]["steps"].values())
    for part, phase in (("training", "policy trains"), ("generation", "policy generates")):
        found = parts[part]
        kept = {name: size for name, size in found["planned"]["resident"].items() if name.startswith("policy ")}
        own = sum(found["planned"]["phases"][phase].values()) + sum(kept.values()) * (part == "training")
        assert found["planned_bytes"] == own > 0, "on a CPU there are no workspaces, and libraries are not counted"
    environment = {"device": "H100", "packages": {"torch": "2.11.0"}}
    table = gpu_report.table({"parts": {"environment": environment, **parts, "quickstart": {"error": "no | time"}}})
    assert "H100; torch 2.11.0; a Qwen2 of 2 layers of 64." in table
    assert f"| a Qwen2 of 2 layers of 64 | eager | {parts['training']['tokens']} |" in table
    assert "| unknown |" in table, "nobody names the peak of a CPU"
    assert "| new weights in the native engine, 1 GPU |" in table
    assert "| new weights in an engine in another process, 1 GPU |" in table
    assert "| quickstart failed | no / time |" in table
    assert "transformers.generate" in table
    assert "most memory in generation, of what `plan` says" in table


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("name", ["training", "generation", "weights"])
def test_what_a_part_says_before_its_end_can_be_shown(name: str) -> None:
    said = [line.removeprefix(MARK) for line in SAID[name].splitlines() if line.startswith(MARK)]
    assert said
    for line in said:
        found = json.loads(line) | {"problem": "stopped after 80 s"}
        assert (f"{name} is not complete", "stopped after 80 s") in gpu_report.rows({"parts": {name: found}})
        assert len(gpu_report.rows({"parts": {name: found}})) > 1


def test_a_part_is_started_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_parts.py", "speeds", "cpu", "tiny", "48"])
    gpu_parts.main()
    found = json.loads(capsys.readouterr().out.removeprefix(MARK))
    assert found["preset"] == {**asdict(PRESETS["tiny"]), "pass_tokens": 48}
    assert all(callable(part_named(name)) for name in MODULES)
    assert {name.partition("@")[0] for name in gpu.LIMITS_S} == {*MODULES}
    assert {*gpu.MEASURED} < {*gpu.LIMITS_S}
    assert {*gpu.TINY} < {*MODULES}


def test_parts_share_the_model_that_the_first_one_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(torch.device("cpu"), PRESETS["tiny"])
    with machine.model_folder() as alone:
        assert Path(alone, "model.safetensors").exists()
    assert not Path(alone).exists()
    monkeypatch.setenv(gpu_machine.MODELS, str(tmp_path))
    with machine.model_folder() as first, machine.model_folder(50.0) as other:
        assert first != other
    (Path(first) / "model.safetensors").write_bytes(b"as it was")
    with machine.model_folder() as again:
        assert again == first
    assert (Path(first) / "model.safetensors").read_bytes() == b"as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["64-2-0", "64-2-50"], "nothing is left over"


def test_published_work_gives_a_figure_for_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(torch.device("cpu"), PRESETS["tiny"])
    parts = {name: part_named(name)(machine) for name in MODULES if name.startswith(published.PREFIX)}
    keys = {entry["key"] for entry in published.load()["one_gpu"]}
    assert published.our_figures(parts).keys() == keys
    assert all(ours.value > 0 for ours in published.our_figures(parts).values())
    said = [line.removeprefix(MARK) for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    assert [len(json.loads(line)["figures"]) for line in said] == [1, 2, 3], "each is kept as soon as it is measured"
    assert parts["published_verl"]["tokens"] == sum([2, 2, 3, 4, 5, 6])
    assert (
        published.our_figures({"published_one": {"error": "stopped after 90 s"}, "generation": {"figures": {}}}) == {}
    )


def test_published_models_have_as_many_weights_as_their_names_say() -> None:
    sizes = {}
    for name, shape in {**gpu_published.QWEN, "8B": gpu_published.LLAMA}.items():
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape.make()).parameters())
    # https://huggingface.co/Qwen/Qwen2.5-0.5B and so on, and Meta-Llama-3-8B
    assert sizes == {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "7B": 7_615_616_512, "8B": 8_030_261_248}


def test_responses_to_published_work_have_the_given_lengths() -> None:
    machine = Machine(torch.device("cpu"), PRESETS["tiny"])
    engine = gpu_published.engine_for(machine, gpu_published.random_model(machine, gpu_published.LLAMA), 2, 12)
    prompts = gpu_published.random_prompts(3, 4, 512)
    responses = gpu_published.responses_of(engine, prompts, [8, 1, 5])
    assert [len(response) for response in responses] == [8, 1, 5]


def test_a_timeline_sorts_operations_and_measures_how_busy_the_device_is(tmp_path: Path) -> None:
    def kernel(name: str, begin: float, length: float, stream: int = 7) -> dict[str, object]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": length, "args": {"stream": stream}}

    def call(name: str, begin: float, length: float) -> dict[str, object]:
        return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": begin, "dur": length}

    events = [
        {"ph": "M", "name": "process_name"},
        call("cudaGraphLaunch", 100, 10),
        call("cudaMalloc", 111, 1),
        call("cudaEventSynchronize", 120, 80),
        kernel("nvjet_tst_128x64", 110, 30),
        kernel("triton_poi_fused_rms_norm_0", 140, 10),
        kernel("flash_fwd_kernel", 160, 20),
        kernel("ncclDevKernel_AllGather", 130, 20, stream=20),
        {**kernel("Memcpy DtoH (Device -> Pinned)", 190, 10), "cat": "gpu_memcpy"},
        kernel("multi_tensor_apply_kernel", 180, 5),
    ]
    found = gpu_timeline.summary(gpu_timeline.operations_of(events))
    assert found["ms"] == 0.1
    assert found["busy"] == 0.75  # 110-150, 160-185 and 190-200 of 100-200
    assert found["kinds"] == {
        "products": 0.03,
        "attention": 0.02,
        "other operations": 0.01,
        "optimizer": 0.005,
        "copies": 0.01,
        "communication": 0.02,
        "starts work": 0.01,
        "waits": 0.08,
    }
    assert list(found["lanes"]) == ["stream 7", "stream 20", "host"]
    assert found["lanes"]["host"] == {"starts work": "0 10", "waits": "20 80"}
    middle = gpu_timeline.summary(gpu_timeline.middle_third(gpu_timeline.operations_of(events)))
    assert middle["ms"] == pytest.approx(0.1 / 3)
    assert middle["kinds"]["products"] == pytest.approx(20 / 3 / 1e3)
    pytest.importorskip("matplotlib", reason="pictures need it")
    gpu_timeline.draw({"a step": found, "its middle": middle}, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5000


def test_a_timeline_is_recorded_of_decoding_and_of_training() -> None:
    panels = gpu_timeline.timeline(Machine(torch.device("cpu"), PRESETS["tiny"]))["panels"]
    decoding, middle, training = panels.values()
    assert decoding["kinds"]["products"] > middle["kinds"].get("products", 0) >= 0
    assert training["kinds"]["attention"] > 0
    assert middle["ms"] <= decoding["ms"] / 3 + 1e-9


def test_neighbors_of_a_timeline_are_joined_only_where_a_picture_cannot_show_the_gap() -> None:
    spans = [gpu_timeline.Operation("stream 7", "products", "gemm", begin, 10.0) for begin in (0, 10.5, 30)]
    assert gpu_timeline.joined(spans, 1.0) == [("stream 7", "products", 0, 20.5), ("stream 7", "products", 30, 10.0)]


def test_an_operation_of_the_cpu_does_what_those_that_it_calls_do_not() -> None:
    def operation(name: str, begin: float, length: float, thread: int = 1) -> dict[str, object]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": begin, "dur": length, "tid": thread}

    events = [
        operation("aten::linear", 0, 100),
        operation("aten::copy_", 10, 20),
        operation("aten::mm", 40, 60),
        operation("aten::resolve_conj", 50, 5),
        operation("aten::softmax", 120, 10),
        operation("aten::copy_", 0, 10, thread=2),
    ]
    found = gpu_timeline.summary(gpu_timeline.operations_of(events))
    assert found["kinds"] == {"products": 0.075, "other operations": 0.015, "copies": 0.03}
    assert found["busy"] == pytest.approx(110 / 130)
    assert list(found["lanes"]) == ["CPU"]


@pytest.mark.thorough
def test_the_quickstart_runs_with_few_steps() -> None:
    found = gpu_quickstart.quickstart(Machine(torch.device("cpu"), PRESETS["tiny"]))
    assert [*found["seconds"]] == ["prepare", "imitate", "export", "reinforce"]
    assert found["mismatch"] >= 0


@pytest.mark.parametrize("has_failed", [False, True])
def test_the_quickstart_runs_where_there_was_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_failed: bool
) -> None:
    base, commands = tmp_path / "runs/quickstart-base", list[list[str]]()
    base.mkdir(parents=True)
    (tmp_path / "runs/quickstart").mkdir()
    (tmp_path / "runs/quickstart/metrics.jsonl").write_text('{"evaluation/accuracy": 0.5, "mismatch/abs_mean": 0.01}\n')

    def run(command: list[str], *, cwd: Path, check: bool) -> None:
        assert cwd == tmp_path
        assert check
        assert "export" not in command or not base.exists(), "it would be refused"
        if has_failed and "export" in command:
            raise subprocess.CalledProcessError(3, command)
        commands.append(command[1:])

    monkeypatch.setattr(gpu_quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_quickstart.subprocess, "run", run)
    machine = Machine(torch.device("cpu"), PRESETS["tiny"])
    if has_failed:
        with pytest.raises(subprocess.CalledProcessError):
            gpu_quickstart.quickstart(machine)
        said = [line.removeprefix(MARK) for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
        assert [*json.loads(said[-1])["seconds"]] == ["prepare", "imitate"]
    else:
        found = gpu_quickstart.quickstart(machine)
        assert (found["accuracy"], found["mismatch"]) == ([0.5, 0.5], 0.01)
        assert [*found["seconds"]] == ["prepare", "imitate", "export", "reinforce"]
        assert "| quickstart | 0 s, accuracy 50.0% → 50.0% |" in gpu_report.table({"parts": {"quickstart": found}})
        assert all("steps=1" in command for command in commands if "train" in command)
