"""Rows between two processes by torch (gloo) and by NIXL (UCX), side by side: `python benchmarks/transports.py`.

Both ranks send and receive rounds of messages of one size, as the databuffer and the weights do, in the same processes
and process group. The ways alternate, so that whatever else the machine does meets both: each pair of measurements
gives one ratio of seconds, and printed are the median of the ratios and their whole range. `--out` writes a file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from leaderless.distributed.one_sided.endpoint import NixlEndpoint
from leaderless.distributed.transport import ProcessGroup, Round, Transport

KIB, MIB = 1 << 10, 1 << 20
CASES = {4 * KIB: 64, 64 * KIB: 64, MIB: 32, 4 * MIB: 16, 32 * MIB: 4}
"""Number of rounds in a measurement, by the bytes of a message."""
TIMEOUT_S = 600.0


def rounds(rank: int, number: int, sent: Tensor, received: Sequence[Tensor]) -> Iterator[Round]:
    """Messages to the other rank and from it, in memory that is used again."""
    for place in range(number):
        yield [(1 - rank, sent)], [(1 - rank, received[place % len(received)])]


def measure(group: ProcessGroup, size: int, number: int) -> tuple[float, float]:
    """Seconds of some rounds, of the slower rank; and seconds of both processes' cores."""
    sent = torch.full((size,), group.rank + 1, dtype=torch.uint8)
    received = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    group.max(torch.zeros(1), "the beginning")
    begin, busy = time.monotonic(), time.process_time()
    group.exchange_rounds(rounds(group.rank, number, sent, received), "rows")
    seconds, cores = time.monotonic() - begin, time.process_time() - busy
    assert all((one == 2 - group.rank).all() for one in received)
    slowest = float(group.max(torch.tensor([seconds], dtype=torch.float64), "the seconds"))
    return slowest, float(group.sum(torch.tensor([cores], dtype=torch.float64), "the seconds of cores"))


def run_rank(rank: int, folder: str, repeats: int, connection: Connection) -> None:
    """Measure all cases on one rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    endpoint = NixlEndpoint(rank)
    transport = Transport(torch.device("cpu"), TIMEOUT_S, endpoint=endpoint)
    ways = {"torch": replace(transport.world, endpoint=None), "nixl": transport.world}
    found = []
    for size, number in CASES.items():
        for group in ways.values():
            measure(group, size, 2)  # to connect
        pairs = []
        for repeat in range(repeats):
            order = list(ways) if repeat % 2 else list(ways)[::-1]
            pairs.append({name: measure(ways[name], size, number) for name in order})
        found.append({"bytes": size, "rounds": number, "pairs": pairs})
    registered, version = endpoint.registered_bytes, endpoint.library.version
    transport.world.sum(torch.zeros(1), "the end")
    transport.close()
    connection.send({"nixl": version, "registered_bytes": registered, "cases": found})


def show(found: dict[str, object]) -> None:
    """Print a table."""
    print(f"nixl {found['nixl']}, {int(str(found['registered_bytes'])) / MIB:.0f} MiB registered on a rank")
    print("| message | torch, MB/s | NIXL, MB/s | seconds, NIXL : torch | seconds of cores, NIXL : torch |")
    print("| --- | --- | --- | --- | --- |")
    for case in found["cases"]:  # type: ignore[attr-defined]
        moved = case["bytes"] * case["rounds"]
        rates = [moved / statistics.median(pair[way][0] for pair in case["pairs"]) / 1e6 for way in ("torch", "nixl")]
        ratios = [sorted(pair["nixl"][kind] / pair["torch"][kind] for pair in case["pairs"]) for kind in (0, 1)]
        spans = [f"{statistics.median(some):.2f} ({some[0]:.2f} to {some[-1]:.2f})" for some in ratios]
        size = f"{case['bytes'] // KIB} KiB" if case["bytes"] < MIB else f"{case['bytes'] // MIB} MiB"
        print(f"| {size} | {rates[0]:.0f} | {rates[1]:.0f} | {spans[0]} | {spans[1]} |")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # modules are there already, and no library has threads yet
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(target=run_rank, args=(rank, folder, arguments.repeats, there))
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        found = pipes[0][0].recv()
        for process in processes:
            process.join()
    show(found)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
