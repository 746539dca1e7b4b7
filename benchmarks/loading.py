"""The start of a model on several ranks: memory and bytes read, where each rank reads its part, and where it reads all.

    python benchmarks/loading.py

A random model of the shape of Qwen2.5-0.5B and a mixture of experts, both in bfloat16 on disk, are opened and divided.
Memory is what a rank holds at its peak on top of what it held before, with a model of a few weights made first; what it
has at the end are float32 weights. Bytes are those that the system counts for the process, headers of files included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
NUM_RANKS = 4
RESULTS = ROOT / "docs/performance/loading.json"
EXPERTS = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
LAYOUTS: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "dense": ({"dp": 1}, {"dp": 2}, {"dp": 4}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2}),
    "experts": ({"dp": 1}, {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 1, "pp": 2}, {"dp": 2, "pp": 2}),
}
"""How ranks divide each model."""


WHOLE_RANKS = 2
"""Most ranks that read whole models at the same time: each needs memory for all of it, however many there are."""


def measure(rank: int, model: str, ways: Mapping[str, Sequence[Mapping[str, int]]], folder: str) -> None:
    """Be one rank: open a model on some layouts, and write what it took."""
    sys.path.insert(0, str(ROOT))
    from tests.distributed.test_mesh import setup_of
    from tests.distributed.test_opened import add_only, opened_whole
    from tests.peak import measured

    from leaderless.base.devices import trim_host_memory
    from leaderless.config.models import ModelConfig
    from leaderless.distributed.transport import Transport
    from leaderless.distributed.weights.blocks import LocalWeight
    from leaderless.models.loading.sharded_loading import open_model
    from leaderless.planner import Layout
    from leaderless.training import fsdp

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    transport, found = Transport(torch.device("cpu"), timeout_s=3600), dict[str, dict[str, dict[str, float]]]()
    for way, layouts in ways.items():
        for sizes in layouts:
            layout = Layout(tuple(range(_num_ranks(sizes))), **sizes)
            if rank not in layout:
                add_only(transport, layout)
                transport.world.max(torch.zeros(1), "the end of a layout")
                continue
            with patch.object(fsdp, "open_model", open_model if way == "parts" else opened_whole):
                setup = setup_of(transport, layout, model)
                fsdp.make_engine(replace(setup, model=ModelConfig(path=f"{model}-small")))
                trim_host_memory()
                before, begin = _bytes_read(), time.perf_counter()
                with measured() as peak:
                    engine = fsdp.make_engine(setup)
            seconds, read = time.perf_counter() - begin, _bytes_read() - before
            held = sum(LocalWeight.of("", one).local.nbytes for one in engine.model.parameters())
            own = {"held": held, "peak": peak.on_top, "read": read, "seconds": seconds}
            found.setdefault(way, {})[json.dumps(sizes)] = own
            del engine, setup
            gc.collect()
            trim_host_memory()
            transport.world.max(torch.zeros(1), "the end of a layout")
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _bytes_read() -> int:
    """Bytes that this process has read from files and elsewhere, cached or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _num_ranks(sizes: Mapping[str, int]) -> int:
    return prod(count for axis, count in sizes.items() if axis != "ep")


def make_models(folder: Path) -> dict[str, str]:
    """Write the models, and small ones of their families."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.real_size import SHAPE
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    paths: dict[str, str] = {}
    for name, kind, shape in (("dense", Qwen2Config, SHAPE), ("experts", Qwen3MoeConfig, EXPERTS)):
        paths[name] = str(folder / name)
        small = {"vocab_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
        for path, changes in ((paths[name], {}), (f"{paths[name]}-small", small)):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(kind(**(shape | changes)), dtype=torch.bfloat16)
            model.to_empty(device="cpu").tie_weights()
            for weight in model.parameters():
                weight.data.uniform_(-0.02, 0.02)
            model.save_pretrained(path, max_shard_size="200MB")
    return paths


def planned(model: str, sizes: Mapping[str, int]) -> int:
    """Bytes that a plan expects on a rank while it reads its part."""
    from leaderless.config import Recipe
    from leaderless.planner import Cluster, make_plan
    from leaderless.planner.workflow import resolve_workflow

    settings = {
        "name": "loading",
        "workflow": "sft",
        "models": {"policy": {"path": model, "compute_dtype": "float32"}},
        "data": {"train": {"path": "rows.jsonl", "response": "response"}},
        "layout": {"policy": dict(sizes)},
        "steps": 1,
    }
    recipe = Recipe.model_validate(settings)
    memory = make_plan(recipe, resolve_workflow("sft"), Cluster(_num_ranks(sizes))).memory
    assert memory is not None, "the size of the model is known"
    return sum(size for name, size in memory.cpu.apart["loading"].items() if name != "libraries")


def main() -> None:
    """Measure all layouts in both ways, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in make_models(Path(folder)).items():
            own = Path(folder, f"results-{name}")
            own.mkdir()
            few = [sizes for sizes in LAYOUTS[name] if _num_ranks(sizes) <= WHOLE_RANKS]
            ways = {"parts": LAYOUTS[name], "whole": few}
            torch.multiprocessing.spawn(measure, (model, ways, str(own)), nprocs=NUM_RANKS)
            ranks = [json.loads(Path(own, f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
            for way, layouts in ways.items():
                for sizes in layouts:
                    found = [one[way][json.dumps(sizes)] for one in ranks[: _num_ranks(sizes)]]
                    most = {key: max(one[key] for one in found) for key in found[0]}
                    if way == "parts":
                        most["planned"] = planned(model, sizes)
                    label = ", ".join(f"`{axis}` {count}" for axis, count in sizes.items() if count > 1) or "one rank"
                    results.setdefault(name, {}).setdefault(label, {})[way] = most
                    print(name, label, way, {key: round(value / 2**20, 1) for key, value in most.items()}, flush=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import benchmarks.loading  # ranks look functions up by the name of their module

    benchmarks.loading.main()
