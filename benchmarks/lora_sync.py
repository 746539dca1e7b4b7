"""Bytes on the wire and seconds until an engine on another host has new weights: all of them, or adapters alone.

    python benchmarks/lora_sync.py  # the table goes into docs/performance/adapters.md

Each of two ranks is on its own host, a network namespace with an interface of limited rate; this needs Linux and root.
One holds a model of the size of a real one in float32, and sends what an update changes in bfloat16. The ways take
turns. The interface counts bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from hosts import INTERFACE, Hosts
from lora_report import FULL, SYNCS, Sync, sync_table
from made import Size

MODELS = {
    "Qwen2.5-0.5B": Size(896, 24, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": Size(1536, 28, 12, 2, 8960, 151936),
}
RANKS = (8, 16)
"""Ranks of adapters."""
PORT, TIMEOUT_S = 29500, 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mbit-per-s", type=float, default=1000.0)
    parser.add_argument("--results", type=Path, default=SYNCS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options.models[0], options.repeats, options.results)
        return
    found: list[Sync] = []
    for model in options.models:
        found += measure(model, options.repeats, options.mbit_per_s)
        text = json.dumps([asdict(one) for one in found], indent=1)
        options.results.write_text(text + "\n", encoding="utf-8")
    print(sync_table(found))


def measure(model: str, repeats: int, mbit_per_s: float) -> list[Sync]:
    """Send weights from one host to another."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, mbit_per_s) as hosts:
        results, log = Path(folder, "results.json"), Path(folder, "log")
        options = ["--models", model, "--repeats", str(repeats), "--results", str(results)]
        hosts.run_ranks(__file__, options, log)
        measured = json.loads(results.read_text(encoding="utf-8"))
    return [Sync(model, mbit_per_s, way, size, seconds) for way, (size, seconds) in measured.items()]


def work(rank: int, model: str, repeats: int, results: Path) -> None:
    """Be one of the ranks; the one that receives measures."""
    import torch
    from torch import distributed

    from leaderless.distributed.transport import Transport
    from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool, everything
    from leaderless.distributed.weights.route import WeightRoute
    from leaderless.distributed.weights.stream import receive_weights, send_weights
    from leaderless.planner import Layout

    address = f"tcp://{os.environ['MASTER_ADDR']}:{PORT}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    transport, layouts = Transport(torch.device("cpu"), TIMEOUT_S), [Layout((one,), 1) for one in (0, 1)]
    for layout in layouts:
        transport.add_process_group(layout.ranks)
    pools = [Pool(layout, everything) for layout in layouts]
    routes, held = dict[str, WeightRoute](), dict[str, HeldWeights]()
    for way, shapes in ways(model):
        routes[way] = WeightRoute(
            "weights of role 'policy'", shapes, pools[0], pools[1], torch.bfloat16, rank, is_gathered=True
        )
        if rank == 0:
            weights = (LocalWeight.of(name, torch.ones(shape)) for name, shape in shapes.items())
            held[way] = HeldWeights.of(weights, 1)
    measured: dict[str, tuple[int, list[float]]] = {}
    for _ in range(repeats + 1):  # the first turn opens connections
        for way, route in routes.items():
            transport.world.max(torch.zeros(1), "the start of a turn")
            begin, bytes_before = time.monotonic(), received_bytes()
            if rank == 0:
                send_weights(route, held[way], transport.world)
                continue
            for _ in receive_weights(route, transport.world, transport.process_group((1,))):
                pass
            seconds, size = time.monotonic() - begin, received_bytes() - bytes_before
            measured[way] = size, [*measured[way][1], seconds] if way in measured else []
    if rank == 1:
        results.write_text(json.dumps(measured), encoding="utf-8")


def ways(model: str) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """What is sent, with the shapes of the weights."""
    from leaderless.config.models import LoraConfig, ModelConfig
    from leaderless.models.causal_lm import empty_causal_lm
    from leaderless.rollout.weight_sources import shapes_of

    with tempfile.TemporaryDirectory() as folder:
        MODELS[model].config().save_pretrained(folder)
        for adapters in (None, *RANKS):
            lora = None if adapters is None else LoraConfig(rank=adapters)
            shapes = shapes_of(empty_causal_lm(ModelConfig(path=folder, lora=lora), "policy"))
            yield FULL if adapters is None else f"adapters of rank {adapters}", shapes


def received_bytes() -> int:
    """Bytes that this host has received."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
