"""The goals for a GPU, the two shares of training, and the published figures next to ours."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # as when they are run
sys.path.append(str(Path(__file__).resolve().parents[3] / "docs"))
from generate_gpu import with_published

import gpu_report
import published
from gpu_goals import GOALS, GPU, goals
from gpu_machine import PRESETS, Machine, Preset
from gpu_training import training
from made import Size
from model_flops import peak_flops, shares, training_flops

SEVEN = PRESETS["7B"]
TRAINING = {"model_flops": 4e14, "tokens": 16384, "forward_backward_s": 2.0, "compiled_forward_backward_s": 1.0}
GENERATION = {"tokens": 512 * 512, "tokens_per_s": {"native": 30.0, "transformers.generate": 90.0}}
GENERATION["bound_tokens_per_s"] = 100.0
WEIGHTS = {"bytes": 15.2e9, "seconds": {"native": 0.25, "apart": 0.5}, "ranks": 1, "copy_s": 0.1, "copy_host_s": 0.01}


def part(result: dict[str, Any], preset: Preset, device: str = GPU) -> dict[str, Any]:
    return {**result, "preset": asdict(preset), "device": device}


def test_goals_are_shown_with_what_was_measured_of_them() -> None:
    page = goals(
        {
            "training": part(TRAINING, PRESETS["1.5B"]),
            "training@0.5B": part({**TRAINING, "compiled_forward_backward_s": None}, PRESETS["0.5B"]),
            "generation": part(GENERATION, PRESETS["1.5B"]),
            "weights@7B": part(WEIGHTS, SEVEN),
        }
    )
    assert "| training, MFU | 0.5B | at least 35 % | 20%, eager layers |" in page  # 200 of 989 TFLOP/s
    assert "| training, MFU | 1.5B | at least 45 % | 40%, compiled layers |" in page
    assert "| decoding 512 rows, share of the bound by products and cache | 1.5B | at least 60 % | 30% |" in page
    assert "| 7B | at most 0.5 s | native 0.25 s, in another process 0.50 s without what vLLM adds |" in page


@pytest.mark.parametrize(
    ("result", "preset", "device"),
    [
        (TRAINING, PRESETS["tiny"], GPU),
        (TRAINING, SEVEN, GPU),
        (TRAINING, PRESETS["1.5B"], "NVIDIA H200"),
        (TRAINING, PRESETS["1.5B"], GPU + " MIG 3g.40gb"),
        (GENERATION, PRESETS["0.5B"], GPU),
        (GENERATION, PRESETS["1.5B"], "NVIDIA A100-SXM4-80GB"),
        ({**GENERATION, "tokens": 256 * 512}, PRESETS["1.5B"], GPU),
        ({**GENERATION, "tokens_per_s": {"transformers.generate": 90.0}}, PRESETS["1.5B"], GPU),
        (WEIGHTS, PRESETS["1.5B"], GPU),
        ({**TRAINING, "error": "out of memory"}, PRESETS["1.5B"], GPU),
        ({"flops": 8e14, "bytes_per_s": 3e12}, PRESETS["1.5B"], GPU),
    ],
)
def test_a_goal_takes_no_figure_of_another_model_work_or_gpu(
    result: dict[str, Any], preset: Preset, device: str
) -> None:
    assert goals({"a part": part(result, preset, device)}).count("not measured") == len(GOALS) == 4


def test_figures_of_a_part_with_a_size_of_its_own_name_it() -> None:
    sizes = {"weights": PRESETS["1.5B"], "weights@7B": SEVEN}
    found = gpu_report.table({"parts": {name: part(WEIGHTS, size) for name, size in reversed(sizes.items())}})
    assert "a Qwen2 of 28 layers of 1536." in found
    assert "| new weights in the native engine, 1 GPU | 60.8 GB/s |" in found
    assert "| new weights in the native engine, 1 GPU, 7B | 60.8 GB/s |" in found


def test_mfu_and_the_share_of_a_large_product_stand_apart() -> None:
    speeds = part({"flops": 8e14, "bytes_per_s": 3e12}, PRESETS["1.5B"])
    table = gpu_report.training_table({"training": part(TRAINING, PRESETS["1.5B"]), "speeds": speeds})
    title, _, eager, compiled = table.splitlines()
    assert title == "| model | layers | tokens | ms | TFLOP/s | MFU | share of a large product | device |"
    assert eager == f"| 1.5B | eager | 16,384 | 2000 | 200 | 20% | 25% | {GPU} |"
    assert compiled == f"| 1.5B | compiled | 16,384 | 1000 | 400 | 40% | 50% | {GPU} |"
    unknown = gpu_report.training_table({"training": part(TRAINING, PRESETS["1.5B"], "a new GPU"), "speeds": speeds})
    assert "| 400 | unknown | not measured | a new GPU |" in unknown
    assert shares(part(TRAINING, PRESETS["1.5B"]), 1.0, {"error": "stopped"}).of_large_product is None
    assert gpu_report.training_table({"training": {"error": "out of memory"}, "speeds": speeds}) == ""


def test_parts_that_were_stopped_show_what_they_have_measured() -> None:
    stopped = {"problem": "stopped after 80 s", "planned_bytes": 2**30}
    parts = {
        "training": {**stopped, **TRAINING, "step_s": 2.5, "peak_bytes": 2**29},
        "generation": {**stopped, **GENERATION},
        "weights": {**stopped, "bytes": 15.2e9, "ranks": 1, "seconds": {"native": 0.25}},
    }
    lines = gpu_report.rows({"parts": parts})
    assert ("an update with its optimizer step", "2500 ms") in lines
    assert ("most memory in an update, of what `plan` says", "0.5 of 1.0 GiB") in lines
    assert ("generation, native", "30 tokens/s (30% of the best)") in lines
    assert ("new weights in the native engine, 1 GPU", "60.8 GB/s") in lines
    assert len(lines) == 6 + len(parts)
    assert "| at most 0.5 s | native 0.25 s |" in goals({"weights": part(parts["weights"], SEVEN)})


def test_peaks_are_known_by_the_exact_name_alone() -> None:
    named = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H200": 989,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 PCIe": 756,  # fewer multiprocessors, and slower ones
    }
    assert {name: peak_flops(name) for name in named} == {name: 1e12 * peak for name, peak in named.items()}
    for name in (
        "",
        "H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090",
        "a CPU, to try the script",
    ):
        assert peak_flops(name) is None, name
    names = [name for entry in published.load()["peaks"] for name in entry["names"]]
    assert len(names) == len(set(names))
    assert all(f"| {entry['tflops']:,} |" in published.peaks() for entry in published.load()["peaks"])


def test_operations_are_those_that_torch_counts() -> None:
    size, tokens = Size(64, 3, 4, 2, 128, 512), 24
    model = AutoModelForCausalLM.from_config(size.config(), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64)).logits.sum().backward()
    # torch computes all pairs, also those in which a token would attend to a later one; in older versions
    # of transformers, angles of positions are a product, too
    angles = 2 * size.hidden // size.heads // 2 * tokens
    assert counter.get_total_flops() - training_flops(size, tokens, tokens, tokens**2) in {0, angles}
    own = tokens * (tokens + 1) // 2
    fewer = training_flops(size, tokens, tokens, tokens**2) - training_flops(size, tokens, tokens, own)
    assert fewer == 12 * 3 * 64 * (tokens**2 - own)
    assert training_flops(size, tokens, 1, own) < training_flops(size, tokens, tokens, own)


def test_a_pass_counts_a_prompt_once_and_pairs_within_a_sample() -> None:
    machine = Machine(torch.device("cpu"), PRESETS["tiny"])
    found = training(machine)
    # one prompt of five tokens and eight responses; the last token of a response predicts nothing
    lengths = (64 // 4 - 5) // 8
    groups = 64 // (5 + 8 * lengths)
    tokens = groups * (5 + 8 * (lengths - 1))
    pairs = groups * (sum(range(1, 6)) + 8 * sum(range(6, 6 + lengths - 1)))
    assert found["tokens"] == tokens
    assert found["model_flops"] == training_flops(machine.preset, tokens, groups * 8 * lengths, pairs)


def test_published_figures_stand_next_to_ours() -> None:
    page = with_published("<!-- published: begin --><!-- published: end -->")
    assert page.count("not measured") == len(published.load()["one_gpu"])
    assert "ours have not been run on any" in page
    ours = {"published_one": {"figures": {"vLLM, one response, 7B": 123.45}, "device": "NVIDIA H200"}}
    page = published.tables({"environment": {"device": "NVIDIA A100"}, **ours})
    assert "| 84.28 tokens/s | 84.3 tokens/s | 123.5 tokens/s, NVIDIA H200 |" in page
    assert page.count("not measured") == len(published.load()["one_gpu"]) - 1
    assert "ours have not been run" not in page
    for entry in (entry for name in ("training", "weights", "many_gpus") for entry in published.load()[name]):
        assert f"| {entry['published']} | {entry['derived']} |" in page


def test_published_figures_name_their_source_and_its_state() -> None:
    tables = published.load()
    assert [*tables] == ["peaks", "one_gpu", "training", "weights", "many_gpus"]
    for entry in (entry for entries in tables.values() for entry in entries):
        assert entry["source"]
        assert re.fullmatch(r"20\d\d(-\d\d-\d\d)?", entry["date"])
        address = re.fullmatch(r"https://(github\.com/.*/blob/([0-9a-f]{40})/.*|.*)", entry["address"])
        assert address
        assert address[2] or "github.com" not in entry["address"] or "/pull/" in entry["address"]


def test_conversions_of_published_figures_are_right() -> None:
    values = {entry["key"]: entry for entry in published.load()["one_gpu"]}
    for key, entry in values.items():
        factor = 256 / 512 if key == "vLLM, many responses, 8B" else 1
        assert entry["value"] == pytest.approx(first_number(entry["published"]) * factor, abs=0.05)
    rates = [entry for entry in published.load()["many_gpus"] if "512 × 16 /" in entry["derived"]]
    for entry in rates:
        seconds = float(entry["published"].split(" s a step")[0])
        assert f"{512 * 16 / seconds:.1f} responses/s" in entry["derived"]
        assert f"{512 * 16 / seconds / int(entry['gpus'].split()[0]):.2f} for each GPU" in entry["derived"]
    assert len(rates) == 3
    steps = next(entry for entry in published.load()["many_gpus"] if entry["by"].startswith("NeMo RL"))
    assert first_number(steps["derived"]) == pytest.approx(2048 * 3203 / 192 / 32, abs=0.5)
    delta, whole = published.load()["weights"]
    assert "7.3 GB/s" in delta["derived"]
    assert 2 * 8.19e9 / first_number(delta["published"]) == pytest.approx(7.3e9, rel=0.01)
    assert first_number(whole["derived"]) * 1e9 == pytest.approx(2 * 235e9 / 3.162, rel=0.01)


@pytest.mark.parametrize("entry", published.load()["training"], ids=lambda entry: f"{entry['model']}, {entry['gpus']}")
def test_published_utilization_is_that_of_its_own_count_and_converted_to_ours(entry: dict[str, Any]) -> None:
    # https://huggingface.co/Qwen/Qwen3-0.6B and https://huggingface.co/Qwen/Qwen3-4B-Instruct-2507, heads of 128
    shapes = {
        "Qwen3-0.6B": Size(1024, 28, 16, 8, 3072, 151936),
        "Qwen3-4B-Instruct-2507": Size(2560, 36, 32, 8, 9728, 151936),
    }
    size, tokens, number = shapes[entry["model"]], 65536, int(entry["gpus"].split()[0])
    speed = first_number(entry["published"]) / number
    ours = training_flops(size, tokens, tokens, tokens * (tokens + 1) // 2, 128) / tokens
    pairs = 12 * size.layers * tokens
    theirs = ours - pairs / 2 * size.heads * 128 + pairs * size.hidden
    assert float(entry["published"].split("MFU ")[1].split()[0]) / 100 == pytest.approx(
        speed * theirs / 989e12, abs=5e-4
    )
    assert first_number(entry["derived"]) / 100 == pytest.approx(speed * ours / 989e12, abs=5e-4)


def first_number(text: str) -> float:
    return float(re.search(r"[\d,.]*\d", text)[0].replace(",", ""))
