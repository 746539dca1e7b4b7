"""New weights of a real model from one host to another, all numbers and changed ones: bytes on the wire and seconds.

    python benchmarks/weight_differences.py PATH-OF-A-MODEL ...

Each of two ranks is on its own host, a network namespace with an interface of limited rate; this needs Linux and root.
One trains a pretrained model with AdamW, in float32, by gradients of GRPO: it samples four responses to each of two
prompts, and prefers those with more different tokens. After each update it sends its weights in bfloat16 twice, whole
and as a difference, and the other rank compares what has arrived bit by bit. The interface counts bytes.
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
from typing import TYPE_CHECKING

from hosts import INTERFACE, Hosts
from weight_differences_report import DIFFERENCE, RESULTS, WHOLE, Travel, Way, load, table

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.distributed.transport import Transport
    from leaderless.distributed.weights.blocks import HeldWeights
    from leaderless.distributed.weights.route import WeightRoute

PORT, TIMEOUT_S = 29500, 1800.0
PROMPTS = ("Natalia sold 48 clips in April and half as many in May. How many clips did she sell?", "Name three colors.")
RESPONSES, TOKENS = 4, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--mbit-per-s", type=float, default=500.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    found = load(options.results)
    for model in options.models:
        found = [one for one in found if one.model != model.name] + [measure(model, options)]
        text = json.dumps([asdict(one) for one in found], indent=1)
        options.results.write_text(text + "\n", encoding="utf-8")
    print(table(found))


def measure(model: Path, options: argparse.Namespace) -> Travel:
    """Train on one host, and send weights to another."""
    rate = options.mbit_per_s
    with tempfile.TemporaryDirectory() as folder, Hosts(2, rate) as hosts:
        results, log = Path(folder, "results.json"), Path(folder, "log")
        arguments = [
            str(model.resolve()),
            *("--updates", str(options.updates), "--learning-rate", str(options.learning_rate)),
            *("--results", str(results)),
        ]
        hosts.run_ranks(__file__, arguments, log)
        changed, measured = json.loads(results.read_text(encoding="utf-8"))
    ways = {name: Way(*numbers) for name, numbers in measured.items()}
    return Travel(model.name, options.learning_rate, rate, changed, ways[WHOLE], ways[DIFFERENCE])


def work(options: argparse.Namespace) -> None:
    """Be one of the ranks; the one that receives measures."""
    import torch
    from torch import Tensor, distributed

    from leaderless.distributed.transport import Transport
    from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool, everything
    from leaderless.distributed.weights.route import WeightRoute
    from leaderless.distributed.weights.sent import SentWeights
    from leaderless.distributed.weights.stream import send_weights
    from leaderless.planner import Layout

    address = f"tcp://{os.environ['MASTER_ADDR']}:{PORT}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=options.rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    transport, layouts = Transport(torch.device("cpu"), TIMEOUT_S), [Layout((one,), 1) for one in (0, 1)]
    for layout in layouts:
        transport.add_process_group(layout.ranks)
    (path,) = options.models
    versions = trained(path, options.learning_rate)
    shapes = shapes_of(path)
    pools = [Pool(layout, everything) for layout in layouts]
    routes = {
        way: WeightRoute(
            "weights of role 'policy'", shapes, pools[0], pools[1], torch.bfloat16, options.rank, is_gathered=True
        )
        for way in (WHOLE, DIFFERENCE)
    }
    routes[DIFFERENCE].sent = SentWeights()
    measured: dict[str, tuple[list[int], list[float], list[float]]] = {way: ([], [], []) for way in routes}
    kept, changed, found = dict[str, Tensor](), list[float](), dict[str, dict[str, Tensor]]()
    for version in range(options.updates + 1):
        held = None
        if options.rank == 0:
            held = HeldWeights.of((LocalWeight.of(name, value) for name, value in next(versions).items()), version)
        for way, route in routes.items():
            transport.world.max(torch.zeros(1), "the start of a turn")
            begin, cpu_begin, bytes_before = time.monotonic(), time.process_time(), received_bytes()
            if held is not None:
                send_weights(route, held, transport.world)
            else:
                base = HeldWeights.of((LocalWeight.of(*one) for one in kept.items()), version - 1)
                found[way] = receive(route, transport, base if kept and way == DIFFERENCE else None)
            seconds, num_bytes = time.monotonic() - begin, received_bytes() - bytes_before
            spent = torch.tensor([time.process_time() - cpu_begin])
            cpu_seconds = float(transport.world.sum(spent, "the time of processors"))
            if version:  # the first turn opens connections, and is whole
                for values, value in zip(measured[way], (num_bytes, seconds, cpu_seconds), strict=True):
                    values.append(value)
        if held is None:
            for name, tensor in found[WHOLE].items():
                assert torch.equal(tensor.view(torch.int16), found[DIFFERENCE][name].view(torch.int16)), name
            if kept:
                counts = [int(torch.count_nonzero(kept[name] != tensor)) for name, tensor in found[WHOLE].items()]
                changed.append(sum(counts) / sum(tensor.numel() for tensor in kept.values()))
            kept = found.pop(DIFFERENCE)
            found.clear()
    if options.rank == 1:
        options.results.write_text(json.dumps([changed, measured]), encoding="utf-8")


def receive(route: WeightRoute, transport: Transport, base: HeldWeights | None) -> dict[str, Tensor]:
    """What arrives, by name."""
    from leaderless.distributed.weights.stream import receive_weights

    return dict(receive_weights(route, transport.world, transport.process_group((1,)), base=base))


def trained(path: Path, learning_rate: float) -> Iterator[dict[str, Tensor]]:
    """The weights of a model, and those after each update."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0)
    while True:
        yield weights
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            sampled = model.generate(
                ids, do_sample=True, num_return_sequences=RESPONSES, min_new_tokens=TOKENS, max_new_tokens=TOKENS
            )
            responses = sampled[:, ids.shape[1] :]
            rewards = torch.tensor([len(one.unique()) / TOKENS for one in responses])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # GRPO, arXiv 2402.03300, equation 10
            logits = model(sampled).logits[:, ids.shape[1] - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(2, responses[..., None])[..., 0]
            (-(advantages[:, None] * log_probs).mean() / len(PROMPTS)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model, by name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def received_bytes() -> int:
    """Bytes that this host has received."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
