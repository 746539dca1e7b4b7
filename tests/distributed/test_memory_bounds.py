"""Checkpoints, export, resume, loading and weight transfer take little memory besides the state itself.

The model has 128 MiB of float32 weights and 384 MiB of state, so that one copy too many shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_checkpoint import writer_of
from tests.peak import Peak, measured
from tests.tiny import tiny_model
from transformers import AutoModelForCausalLM

from leaderless.base.devices import trim_host_memory
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.transport import Transport
from leaderless.distributed.weights.blocks import HeldWeights, Pool, even_rows, everything
from leaderless.distributed.weights.route import BUCKET_BYTES, WeightRoute
from leaderless.distributed.weights.stream import WeightStream, fill_weights, receive_weights, send_weights
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.planner import Layout
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.weight_sources import Fed
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.checkpoint.export import export_model
from leaderless.worker.checkpoint.reader import RunState, load_checkpoint
from leaderless.worker.checkpoint.shards import BLOCK_BYTES
from leaderless.worker.checkpoint.writer import Content

MIB = 1 << 20
SLACK = 32 * MIB
"""Memory of Python, torch and the allocator."""


@pytest.fixture(scope="module")
def medium_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 with about 32 million weights."""
    folder = write_tiny_model(
        tmp_path_factory.mktemp("medium"), "0123456789", hidden_size=512, num_layers=10, num_heads=8
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_engine(model: str, transport: Transport, *, is_trained: bool = True) -> FsdpEngine:
    config = ModelConfig(path=model)
    optimizer = OptimizerConfig() if is_trained else None
    causal = load_causal_lm(config, "policy")
    for rank in transport.world.ranks:
        transport.add_process_group((rank,))
    return FsdpEngine(
        causal, config, transport.process_group((transport.rank,)), torch.device("cpu"), 64, optimizer=optimizer
    )


def update(engine: FsdpEngine) -> list[torch.Tensor]:
    """Make an update. What is returned lies above the gradients in memory, as something does after most passes."""
    for _, weight in engine.named_weights():
        weight.grad = torch.ones_like(weight)
    lasting = [torch.ones(MIB // 2) for _ in range(4)]
    engine.optimizer_step()
    return lasting


def write_and_read(model: str, folder: str) -> tuple[int, dict[str, Peak]]:
    """Bytes of the weights, and of each operation."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    work: dict[str, Peak] = {}
    make_engine(tiny_model(), transport)  # imports what is needed
    with measured() as work["load"]:
        engine = make_engine(model, transport)
    engine.state()
    lasting = update(engine)  # freed blocks of this size raise the bound below which glibc keeps blocks
    trim_host_memory()
    with measured() as work["update"]:
        lasting += update(engine)
    assert lasting
    writer = writer_of(folder, engine, transport, model)
    content = Content(RunState(1, 0, 0.0))
    for name, from_copy in (("synchronous", False), ("asynchronous", True), ("asynchronous again", True)):
        with measured() as work[name]:
            writer.begin(content, from_copy=from_copy)
            writer.finish()
    checkpoint = Path(folder) / "step-000001"
    with measured() as work["resume"]:
        load_checkpoint(checkpoint, {"policy": engine})
    num_bytes = sum(weight.nbytes for _, weight in engine.named_weights())
    del engine, writer
    with measured() as work["export"]:
        export_model(checkpoint, "policy", Path(folder) / "export")
    return num_bytes, work


def test_what_is_written_and_read_passes_through_little_memory(
    ranks: RankPool, tmp_path: Path, medium_model: Path
) -> None:
    ((weights, work),) = ranks.run(1, write_and_read, str(medium_model), str(tmp_path))
    assert weights > 100 * MIB
    bounds = {
        "load": weights,
        "update": weights,
        "synchronous": 0,
        "asynchronous": 3 * weights,
        "asynchronous again": 0,
        "resume": 0,
        "export": weights,
    }
    for name, bound in bounds.items():
        assert work[name].on_top < bound + SLACK, (name, work[name])
    assert work["update"].after < work["update"].before + SLACK, "gradients are returned to the system"
    assert weights / 2 > SLACK, "one copy too many, in bfloat16 too, would show"
    assert BLOCK_BYTES + SLACK < 256 * MIB


class Keeping:
    """An engine that only keeps its weights."""

    def __init__(self) -> None:
        self.weights = dict[str, torch.Tensor]()

    def wake(self, reload: Callable[[], None]) -> None:
        """Be awake already."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        for name, tensor in weights:
            self.weights[name] = tensor


def bring_weights(model: str, how: str) -> Peak:
    """Memory of a transfer to rank 1: of blocks, of whole weights that are dropped, or of those that replace others."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(model, transport, is_trained=transport.rank == 0)
    held = HeldWeights.of(engine.local_weights(), 0)
    holders, takers = (Layout((rank,), 1) for rank in (0, 1))
    pools = Pool(holders, even_rows), Pool(takers, even_rows if how == "blocks" else everything)
    route = WeightRoute(
        "weights of role 'policy'", held.shapes, *pools, torch.float32, transport.rank, is_gathered=how != "blocks"
    )
    serving = Fed(cast("RolloutEngine", Keeping()), route, transport.process_group((transport.rank,)))
    if how == "replaced" and transport.rank == 0:
        send_weights(route, held, transport.world)
    elif how == "replaced":
        serving.receive(transport.world, None, None)
    with measured() as peak:
        if transport.rank == 0:
            send_weights(route, held, transport.world)
        elif how == "replaced":
            serving.receive(transport.world, None, None)
        elif how == "whole":
            receive_weights(route, transport.world, transport.process_group((1,))).drain()
        else:
            fill_weights(route, held, transport.world)
    return peak


@pytest.mark.parametrize("how", ["blocks", "whole", "replaced"])
def test_weights_pass_through_little_memory(ranks: RankPool, medium_model: Path, how: str) -> None:
    num_buckets = 2 if how == "blocks" else 4  # messages, and the weights that are made of them
    sender, receiver = ranks.run(2, bring_weights, str(medium_model), how)
    for peak in (sender, receiver):
        assert peak.on_top < num_buckets * BUCKET_BYTES + SLACK, peak
    # The heap of the sender may keep buckets for the next time.
    assert how != "replaced" or receiver.after < receiver.before + SLACK // 2, receiver
    assert 4 * BUCKET_BYTES + SLACK < 256 * MIB
