"""Runs that continue with another layout than they began with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.tiny import add_gradients
from torch import Tensor

from leaderless.config.run import CheckpointConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout
from leaderless.training.fsdp import make_engine
from leaderless.training.micro_batches import MicroBatch
from leaderless.worker.checkpoint.reader import RunState, load_checkpoint
from leaderless.worker.checkpoint.writer import CheckpointWriter, Content

Loss = Callable[[TokenOutputs, MicroBatch], Tensor]
Sizes = dict[str, int]


def update_once(folder: str, model: str, samples: Batch, loss: Loss, sizes: Sizes, way: str) -> Numbers:
    """Weights after an update of a run that begins, and is saved, or continues from what was saved."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, **sizes), model)
    engine = make_engine(setup)
    if way == "continue":
        (checkpoint,) = list_checkpoints(Path(folder))
        load_checkpoint(checkpoint, {"policy": engine})
    mine = torch.arange(len(samples)) % setup.layout.dp == setup.layout.shard_of(transport.rank)
    add_gradients(engine, samples.select(mine), loss)
    engine.optimizer_step()
    if way == "begin":
        tokenizer, config = load_tokenizer(setup.model, "policy"), CheckpointConfig()
        files = {"recipe.yaml": ""}
        writer = CheckpointWriter(Path(folder), {"policy": engine}, transport.world, tokenizer, config, 30.0, files)
        writer.begin(Content(RunState(1, 0, 0.0)))
        writer.finish()
    return {name: value.clone() for name, value in engine.full_weights()}


def check_continued(
    ranks: RankPool,
    folder: Path,
    model: str,
    samples: Batch,
    loss: Loss,
    cases: Sequence[tuple[Sizes, Sequence[Sizes]]],
) -> None:
    """Runs that begin with a layout, and continue with others, have the weights of one rank after each update."""

    def numbers(name: str, sizes: Sizes, way: str) -> list[Numbers]:
        num_ranks = prod(size for axis, size in sizes.items() if axis != "ep")
        return ranks.run(num_ranks, update_once, str(folder / name), model, samples, loss, sizes, way)

    (first,), (expected,) = (numbers("alone", {"dp": 1}, way) for way in ("begin", "continue"))
    assert largest_difference([expected], first) > 1e-4
    for number, (begins, others) in enumerate(cases):
        assert largest_difference(numbers(f"divided-{number}", begins, "begin"), first) < 1e-5
        for sizes in others:
            assert largest_difference(numbers(f"divided-{number}", sizes, "continue"), expected) < 1e-5
