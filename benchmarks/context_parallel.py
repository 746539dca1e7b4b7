"""One long sample on ranks that divide its tokens or the layers: memory and seconds of a forward and a backward pass.

    python benchmarks/context_parallel.py [--tokens 65536]

Memory is what a rank holds at its peak on top of the model, which is a small one. Ranks are processes with one thread;
with fewer cores than ranks, their seconds say nothing about scaling.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
CASES = (("ulysses", 1), ("ulysses", 2), ("ulysses", 4), ("ring", 2), ("ring", 4), ("tp", 2))
"""How ranks divide it, and how many."""


def measure(rank: int, method: str, size: int, model: str, num_tokens: int, folder: str) -> None:
    """Be one rank: pass a sample through the model and back, and write what it took."""
    sys.path.insert(0, str(ROOT))
    from tests.peak import measured
    from tests.tiny import add_gradients

    from leaderless.config.models import ModelConfig, OptimizerConfig
    from leaderless.data.batch import Batch, Jagged
    from leaderless.distributed.transport import Transport
    from leaderless.models.attention.ring import RingParallel
    from leaderless.planner import Layout
    from leaderless.training.engine import EngineSetup
    from leaderless.training.fsdp import make_engine

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", f"file://{folder}/store-{method}-{size}", rank=rank, world_size=size)
    axis = "tp" if method == "tp" else "cp"
    transport, layout = Transport(torch.device("cpu"), timeout_s=3600), Layout(tuple(range(size)), 1, **{axis: size})
    transport.add_axes([layout])
    engine = make_engine(
        EngineSetup(
            role="policy",
            model=ModelConfig(path=model),
            is_critic=False,
            layout=layout,
            process_group=transport.world,
            axis_groups=transport.axis_groups(layout),
            device=torch.device("cpu"),
            optimizer=OptimizerConfig(),
            num_updates=1,
            micro_batch_tokens=num_tokens // layout.cp,
        )
    )
    if method == "ring":
        engine.divide_passes(RingParallel(transport.process_group(layout.peers(rank, "cp"))))
    tokens = torch.randint(0, 60, (num_tokens + 1,), generator=torch.Generator().manual_seed(1))
    prompt, response = tokens[: num_tokens // 2].tolist(), tokens[num_tokens // 2 :].tolist()
    columns = {
        "prompt_tokens": Jagged.from_lists([prompt], torch.int64, "prompt_tokens"),
        "tokens": Jagged.from_lists([response], torch.int64, "tokens"),
        "response_mask": Jagged.from_lists([[True] * len(response)], torch.bool, "tokens"),
    }
    batch = Batch(torch.zeros(1, dtype=torch.int64), columns)
    begin = time.perf_counter()
    with measured() as peak:
        add_gradients(engine, batch, lambda outputs, _: outputs.log_probs.mean())
    seconds, norm = time.perf_counter() - begin, engine.optimizer_step().grad_norm
    found = {"bytes": peak.on_top, "seconds": seconds, "norm": norm}
    Path(folder, f"{method}-{size}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.tiny import CHARACTERS

    from leaderless.models.loading.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 64, "num_heads": 4, "max_positions": arguments.tokens + 1}
        model = str(write_tiny_model(Path(folder, "model"), CHARACTERS, family="qwen3", **shape))
        for method, size in CASES:
            torch.multiprocessing.spawn(measure, (method, size, model, arguments.tokens, folder), nprocs=size)
            found = [json.loads(Path(folder, f"{method}-{size}-{rank}.json").read_text()) for rank in range(size)]
            most = {name: max(one[name] for one in found) for name in ("bytes", "seconds", "norm")}
            took = f"{most['bytes'] / 2**20:.0f} MiB, {most['seconds']:.1f} s, norm {most['norm']:.6g}"
            print(f"{method} on {size}: {took}", flush=True)


if __name__ == "__main__":
    main()
