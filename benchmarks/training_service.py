"""How many steps clients of a training service make together, and as many separate trainers; and how it shares time.

    python benchmarks/training_service.py [MODEL] [--tenants 1 4 8] [--steps 10] [--repeats 5]

Needs the package `tinker`. Server and clients are one process, so that all work counts that a request costs. Separate
trainers have a copy of the model each, and make the same steps in turns, in this process, without a server. Each repeat
measures both, one after the other, and the figures are medians. Processor seconds do not count what other programs on
the machine take; seconds of the clock do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tinker
import torch
from tests.unit.serving.training.services import KEY, served_model

from leaderless.config.models import LoraConfig, OptimizerConfig
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.serving.training.adapters import packed
from leaderless.serving.training.service import TrainingService
from leaderless.training.fsdp import FsdpEngine

RANK, SEQUENCES, LENGTH = 8, 32, 32
RATE = 1e-4
Seconds = tuple[float, float]
"""Of the clock, and of the processor."""


def timed(work: Callable[[], object]) -> Seconds:
    """Seconds that work takes."""
    begin = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def sequences(seed: int, vocabulary: int) -> list[list[int]]:
    """Random sequences."""
    drawn = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(1, vocabulary, (SEQUENCES, LENGTH + 1), generator=drawn).tolist()
    return found


def datum(tokens: Sequence[int]) -> tinker.Datum:
    """A sequence as clients send it."""
    inputs = {
        "target_tokens": tinker.TensorData(data=[*tokens[1:]], dtype="int64"),
        "weights": tinker.TensorData(data=[1.0] * LENGTH, dtype="float32"),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([*tokens[:-1]]), loss_fn_inputs=inputs)


def by_client(model: tinker.TrainingClient, data: list[tinker.Datum], steps: int) -> None:
    """Steps of a client, each sent before the one before it has ended."""
    futures = []
    for _ in range(steps):
        futures.append(model.forward_backward(data, "cross_entropy"))
        futures.append(model.optim_step(tinker.AdamParams(learning_rate=RATE)))
    for future in futures:
        future.result()


def by_trainers(trainers: Sequence[FsdpEngine], data: Sequence[list[list[int]]], steps: int) -> None:
    """Steps of trainers, one after the other."""
    for _ in range(steps):
        for trainer, own in zip(trainers, data, strict=True):
            tokens = [torch.tensor(one) for one in own]
            scores = trainer.forward(packed([one[:-1] for one in tokens], [one[1:] for one in tokens]), "none")
            (-scores.log_probs).sum().backward()
            trainer.optimizer_step()


def measure(url: str, service: TrainingService, num: int, steps: int, repeats: int) -> None:
    """Measure some clients, and as many trainers, and print what was found."""
    data = [sequences(seed, service.model.vocabulary) for seed in range(num)]
    clients = [tinker.ServiceClient(base_url=url, api_key=KEY) for _ in range(num)]
    name = service.model.name
    models = [client.create_lora_training_client(name, rank=RANK).result() for client in clients]
    sent = [[datum(one) for one in own] for own in data]
    config = OptimizerConfig(learning_rate=RATE)
    trainers = [service.model._instance(LoraConfig(rank=RANK), config, None) for _ in range(num)]  # noqa: SLF001
    served, apart = list[Seconds](), list[Seconds]()
    with ThreadPoolExecutor(num) as threads:

        def together() -> None:
            list(threads.map(partial(by_client, steps=steps), models, sent))

        together()
        by_trainers(trainers, data, steps)
        before = service.queue.used_s()
        for _ in range(repeats):
            served.append(timed(together))
            apart.append(timed(partial(by_trainers, trainers, data, steps)))
    used = {one: seconds - before.get(one, 0.0) for one, seconds in service.queue.used_s().items()}
    shares = [seconds / sum(used.values()) * num for seconds in used.values()]
    clock, processor = (statistics.median(a[i] / b[i] for a, b in zip(served, apart, strict=True)) for i in (0, 1))
    per_s = num * steps / statistics.median(a for a, _ in served)
    print(
        f"{num} tenants: {per_s:.1f} steps/s; time of separate trainers times {clock:.2f} (clock), {processor:.2f} "
        f"(processor); share of time {min(shares):.2f} to {max(shares):.2f} of an equal one",
        flush=True,
    )
    for client in clients:
        client.close("success").result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or write_tiny_model(Path(folder) / "tiny", "0123456789+=", hidden_size=128, num_layers=2)
        with served_model(str(path), Path(folder) / "service") as (address, running):
            for count in given.tenants:
                measure(address, running, count, given.steps, given.repeats)
