"""The benchmark for GPUs, tried with a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # as when they are run
from benchmarks import gpu, published

import gpu_parts
import gpu_published
import gpu_report
import gpu_timeline
from gpu_machine import PRESETS, Machine
from gpu_parts import MODULES, part_named


def test_every_part_is_kept_as_soon_as_it_is_done(tmp_path: Path) -> None:
    path, machine = tmp_path / "gpu.json", Machine(torch.device("cpu"), PRESETS["tiny"])

    def run(part: str, limit_s: float) -> dict[str, object]:
        assert part not in json.loads(path.read_text())["parts"] if path.exists() else True
        assert 0 < limit_s <= gpu.LIMITS_S[part]
        if part == "tests":
            return {"passed": 3, "failed": 0, "errors": 0, "skipped": 1, "failures": []}
        if part == "quickstart":
            raise RuntimeError("exit code 1: no | wheels")
        if part == "timeline" or part.startswith(published.PREFIX):
            return {"preset": asdict(machine.preset)}  # these have tests of their own
        return json.loads(json.dumps(part_named(part)(machine) | {"preset": asdict(machine.preset)}))

    results = gpu.measure(list(gpu.LIMITS_S), run, path, 480)
    assert json.loads(path.read_text()) == results
    assert set(results["parts"]) == set(gpu.LIMITS_S)
    assert set(gpu.LIMITS_S) == {*MODULES, "tests", "quickstart"}
    assert results["parts"]["agreement"]["key_bias"]["0"]["mean"] < 1e-4
    assert results["parts"]["agreement"]["key_bias"]["50"]["mean"] < 1e-3
    assert results["parts"]["training"]["tokens"] <= PRESETS["tiny"].pass_tokens
    for part, phase in (("training", "policy trains"), ("generation", "policy generates")):
        found = results["parts"][part]
        kept = {name: size for name, size in found["planned"]["resident"].items() if name.startswith("policy ")}
        own = sum(found["planned"]["phases"][phase].values()) + sum(kept.values()) * (part == "training")
        assert found["planned_bytes"] == own > 0, "on a CPU there are no workspaces, and libraries are not counted"
    assert results["parts"]["decoding"]["steps"]["no graphs"]["ms_per_step"] > 0
    table = gpu_report.table(results)
    assert f"| a Qwen2 of 2 layers of 64 | eager | {results['parts']['training']['tokens']} |" in table
    assert "| unknown |" in table, "nobody names the peak of a CPU"
    assert "| new weights in the native engine, 1 GPU |" in table
    assert "| new weights in an engine in another process, 1 GPU |" in table
    assert "| quickstart failed | exit code 1: no / wheels |" in table
    assert "transformers.generate" in table
    assert "most memory in generation, of what `plan` says" in table
    again = gpu.measure(["quickstart"], lambda *_: {"seconds": {"a": 2.0}, "accuracy": [0.25, 0.5]}, path, 480)
    assert "| quickstart | 2 s, accuracy 25.0% → 50.0% |" in gpu_report.table(again)


def test_a_part_is_started_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(command: list[str], _: float) -> str:
        assert Path(command[1]) == Path(gpu_parts.__file__)
        monkeypatch.setattr(sys, "argv", command[1:])
        gpu_parts.main()
        return capsys.readouterr().out.removeprefix(gpu.MARK)

    monkeypatch.setattr(gpu, "answer_of", answer)
    found = gpu.run_part("environment", "cpu", "tiny", 1)
    assert found["preset"] == asdict(PRESETS["tiny"])
    assert gpu_report.table({"parts": {"environment": found}}).startswith("a CPU, to try the script; torch 2.")
    assert all(callable(part_named(name)) for name in MODULES)


def test_published_work_gives_a_figure_for_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(torch.device("cpu"), PRESETS["tiny"])
    parts = {name: part_named(name)(machine) for name in MODULES if name.startswith(published.PREFIX)}
    keys = {entry["key"] for entry in published.load()["one_gpu"]}
    assert published.our_figures(parts).keys() == keys
    assert all(ours.value > 0 for ours in published.our_figures(parts).values())
    said = [line.removeprefix(gpu.MARK) for line in capsys.readouterr().out.splitlines() if line.startswith(gpu.MARK)]
    assert [len(json.loads(line)["figures"]) for line in said] == [1, 2, 3], "each is kept as soon as it is measured"
    assert parts["published_verl"]["tokens"] == sum([2, 2, 3, 4, 5, 6])
    assert published.our_figures({"published_one": {"error": "no time was left"}, "generation": {"figures": {}}}) == {}


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


def test_a_part_that_takes_too_long_is_stopped_and_the_others_have_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="stopped after 1 s; it said last: begun"):
        gpu.output_of(["sh", "-c", "echo begun; sleep 60"], 1)  # Python may take a second to start
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"parts": {"training": {"step_s": 2.0}}}))
    results = gpu.measure(["speeds", "training"], lambda *_: {}, path, 5)
    assert results["parts"] == {"speeds": {"error": "no time was left"}, "training": {"step_s": 2.0}}
    assert json.loads(path.read_text()) == results


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nAssertionError: Torch not compiled with CUDA enabled\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        SystemExit, match=r"nothing was measured: this machine has no CUDA GPU .* not compiled with CUDA"
    ):
        gpu.check_device("cuda")
    gpu.check_device("cpu")
