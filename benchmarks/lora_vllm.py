"""Seconds until a vLLM next to the trainer has new weights: all of them, or adapters alone.

    python benchmarks/lora_vllm.py --python PYTHON  # the table goes into docs/performance/adapters.md

PYTHON is the interpreter of an environment with vLLM, which runs in another process of this machine, on the CPU and in
bfloat16. The model has the size of a real one and random weights; the trainer's are in float32. Each version changes
all that is sent, which the log-probabilities of a text have to show.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from leaderless.base.values import Json
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.messages import Settings
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.planner.graph.adapters import describe
from leaderless.rollout.external.vllm_engine import VllmServer
from lora_report import FULL, LOADS, Load, load_table
from lora_sync import MODELS, RANKS

ADAPTER = "policy"
TEXT = [*range(5, 37)]
"""Tokens whose log-probabilities show that weights have changed."""
TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen2.5-0.5B"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=LOADS)
    options = parser.parse_args()
    found: list[Load] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            config = MODELS[model].config()
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            for rank in (None, *RANKS):
                found.append(measure(model, folder, rank, options.python, options.repeats))
                text = json.dumps([asdict(one) for one in found], indent=1)
                options.results.write_text(text + "\n", encoding="utf-8")
    print(load_table(found))


def measure(model: str, folder: str, rank: int | None, python: str, repeats: int) -> Load:
    """Load versions of all weights, or of adapters of a rank, into an engine that has loaded one before."""
    adapter = "" if rank is None else ADAPTER
    config = ModelConfig(path=folder, lora=None if rank is None else LoraConfig(rank=rank))
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: 0.02 * torch.randn(weight.shape, generator=noise)
        for name, weight in empty_causal_lm(config, ADAPTER).trained_weights()
    }
    seconds, seconds_inside, before = list[float](), list[float](), list[float]()
    with started(config, [*weights], python, Path(folder, "vllm.log")) as (driver, server):
        for version in range(repeats + 1):  # the first turn allocates memory
            begin = time.monotonic()
            server.seconds = 0.0
            driver.load(WeightStream(iter(weights.items()), version), adapter)
            if version:
                seconds.append(time.monotonic() - begin)
                seconds_inside.append(server.seconds)
            now = driver.prompt_log_probs(TEXT, adapter)
            if now == before:
                raise RuntimeError(f"vLLM computes with the weights before version {version}")
            before = now
            change(weights)
    num_bytes = sum(weight.numel() for weight in weights.values()) * torch.bfloat16.itemsize
    return Load(model, FULL if rank is None else f"adapters of rank {rank}", num_bytes, seconds, seconds_inside)


def change(weights: dict[str, Tensor]) -> None:
    """Change all weights, as an update does."""
    for weight in weights.values():
        weight.mul_(1.05)


class Timed(ChildServer):
    """A server, with the seconds for which its answers were awaited."""

    seconds = 0.0

    def call(self, path: str, body: Json) -> Json:
        """See `ChildServer`."""
        begin = time.monotonic()
        answer = super().call(path, body)
        self.seconds += time.monotonic() - begin
        return answer


@contextmanager
def started(config: ModelConfig, names: list[str], python: str, log: Path) -> Iterator[tuple[VllmServer, Timed]]:
    """An engine that is awake, and its server."""
    adapters, matrices = {}, {}
    if config.lora is not None:
        adapters = {ADAPTER: describe(config, sorted({name.split(".")[-2] for name in names}))}
        matrices = {ADAPTER: names}
    settings = Settings(
        model=config.path,
        revision=None,
        trust_remote_code=False,
        dtype="bfloat16",
        max_tokens=512,
        max_sequences=4,
        memory_fraction=0.3,
        kv_cache_bytes=1 << 26,
        enable_graphs=False,
        adapters=adapters,
        matrices=matrices,
    )
    server = Timed("vLLM", log, TIMEOUT_S, TIMEOUT_S, lambda: None)
    driver = VllmServer(python, settings, torch.device("cpu"), server)
    try:
        driver.start()
        driver.wake()
        yield driver, server
    finally:
        driver.close()


if __name__ == "__main__":
    main()
