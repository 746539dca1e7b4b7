"""What ranks do with one device: one alone, or two that share it. On the CPU gloo stands for the accelerator's library.

`tests/gpu/test_one_device.py` does the same on a GPU.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankPool
from tests.distributed.test_training import LENGTHS
from tests.tiny import add_gradients, random_samples, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from leaderless.base.devices import DeviceSetup, setup_device
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.remote.messages import SharedMemory
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.distributed.weights.buckets import (
    CudaStaging,
    HostStaging,
    LocalStaging,
    PackedWeight,
    checksum,
    make_buckets,
)
from leaderless.models.causal_lm import load_causal_lm
from leaderless.training.fsdp import FsdpEngine

Kind = Literal["cpu", "cuda"]
TURNS = 40
"""Sums on a device, and messages through host memory at the same time."""


def join(kind: Kind) -> tuple[Transport, torch.device]:
    """Make the process group of all ranks, which share a device of a kind with rank 0, as workers do."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    setup = setup_device(0, 1) if kind == "cuda" else DeviceSetup(torch.device("cpu"), "gloo")
    dist.init_process_group(setup.backend, rank=rank, world_size=size)
    return Transport(setup.device, timeout_s=60, sharing=dict.fromkeys(range(1, size), 0)), setup.device


def collectives_of_one(kind: Kind) -> None:
    """Every collective of a rank that has nobody to wait for, in process groups that are made in either way."""
    transport, device = join(kind)
    groups = [dist.new_group([0]), dist.new_group([0], use_local_synchronization=True)]
    for group in (transport.world, *(ProcessGroup((0,), 0, handle, device, timeout_s=60.0) for handle in groups)):
        values = torch.arange(6.0, device=device).view(2, 3)
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            result = values.clone()
            dist.all_reduce(result, operation, group=group.handle)
            assert torch.equal(result, values)
        part = torch.empty_like(values)
        dist.reduce_scatter_tensor(part, values, group=group.handle)
        assert torch.equal(part, values)
        row = values[:1].contiguous()
        assert torch.equal(group.gather_even(values, "x")[0], values)
        assert torch.equal(group.swap(row, "x"), row)
        assert torch.equal(group.swap_uneven(values, [2], [2], "x"), values)
        assert group.swap_numbers(torch.tensor([7], device=device), "x") == [[7], [7]]
        data = torch.arange(9, dtype=torch.uint8, device=device)
        assert torch.equal(group.gather_equal(data, "x").wait()[0], data)
        assert int(group.sum(torch.tensor(3), "x")) == 3
    dist.all_reduce(host := torch.tensor(3.0))
    assert float(host) == 3.0


def sharded_update_of_one(kind: Kind) -> tuple[float, float]:
    """The norm of a gradient that FSDP holds in shards, of which there is one, and the norm by hand."""
    transport, device = join(kind)
    mesh = DeviceMesh.from_group(transport.world.torch_group, device.type, mesh_dim_names=("dp",))
    whole = torch.arange(12.0, device=device).view(4, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert float(torch.linalg.vector_norm(sharded).full_tensor()) == pytest.approx(float(whole.norm()))
    config = ModelConfig(path=tiny_model(), compute_dtype="bfloat16")
    model, optimizer = load_causal_lm(config, "policy"), OptimizerConfig(learning_rate=1e-3)
    engine = FsdpEngine(model, config, transport.world, device, 64, optimizer=optimizer, num_updates=1)
    add_gradients(engine, random_samples(LENGTHS, siblings=3), lambda outputs, _: -outputs.log_probs.sum() / 50)
    gradients = [parameter.grad for _, parameter in engine.named_weights()]
    assert all(isinstance(gradient, DTensor) and gradient.device.type == kind for gradient in gradients)
    squares = [gradient.to_local().double().square().sum() for gradient in gradients if isinstance(gradient, DTensor)]
    by_hand = float(torch.stack(squares).sum().sqrt())
    return engine.optimizer_step().grad_norm, by_hand


def sum_alone_and_talk(kind: Kind) -> tuple[str, list[float], list[list[int]]]:
    """Be one of two ranks: each sums on the device, alone, while it sends the other one bytes through host memory."""
    transport, device = join(kind)
    world, rank = transport.world, transport.rank
    for ranks in ((0,), (1,)):
        transport.add_process_group(ranks)
    transport.add_lane("words", (0, 1))
    alone, lane, other = transport.process_group((rank,)), transport.lane("words", (0, 1)), 1 - rank
    assert alone.payload_device == device
    heard: list[list[int]] = []

    def talk() -> None:
        for turn in range(TURNS):
            arrived = lane.exchange({other: torch.full((3,), 10 * rank + turn, dtype=torch.uint8)}, [other], "words")
            heard.append(arrived[other].tolist())

    thread = threading.Thread(target=talk)
    thread.start()
    sums = []
    for turn in range(TURNS):
        values = torch.full((1 << 16,), float(turn), device=device)
        dist.all_reduce(values, group=alone.handle)
        sums.append(float(values.mean()))
        assert int(world.sum(torch.tensor(rank), "host memory")) == 1
        arrived = world.exchange({other: torch.tensor([turn, rank], dtype=torch.uint8)}, [other], "bytes")
        assert arrived[other].tolist() == [turn, other]
    thread.join()
    return str(world.payload_device), sums, heard


def own_weights(device: torch.device) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(f"weight {i}", torch.randn(100 + i, 70, generator=generator).to(device)) for i in range(5)]


def read_weights_of_the_other(kind: Kind) -> list[str]:
    """Be one of two ranks: rank 0 packs weights into memory that rank 1 opens; returns what this one has read."""
    transport, device = join(kind)
    world, is_sender = transport.world, transport.rank == 0
    weights, memory, found = own_weights(device), SharedMemory(), list[str]()
    staging: LocalStaging = CudaStaging(device) if kind == "cuda" else HostStaging()
    assert isinstance(staging, CudaStaging | HostStaging)
    buckets = make_buckets(weights, torch.bfloat16, staging, 40_000) if is_sender else iter(())
    expected = dict(weights)
    while True:
        bucket, text = next(buckets, None), ""
        if bucket is not None:
            named = [asdict(weight) for weight in bucket.weights]
            sent = {"place": staging.place(), "bytes": len(bucket.data), "weights": named, "sum": checksum(bucket.data)}
            text = json.dumps(sent)  # the checksum has waited for the copies
        if not (text := world.broadcast_text(text, 0, "a bucket")):
            break
        if not is_sender:
            bucket_there = json.loads(text)
            data = memory.open(bucket_there["place"])[: bucket_there["bytes"]]
            assert data.device.type == kind
            assert checksum(data.clone()) == bucket_there["sum"]
            for packed in (PackedWeight(**weight) for weight in bucket_there["weights"]):
                assert torch.equal(packed.view(data), expected[packed.name].bfloat16())
                found.append(packed.name)
        world.max(torch.zeros(1), "a bucket that was read")  # before the next one overwrites it
    memory.close()
    staging.close()
    return found


def test_a_rank_alone_gets_back_what_it_sends(ranks: RankPool) -> None:
    ranks.run(1, collectives_of_one, "cpu", init_group=False)


def test_a_gradient_in_one_shard_has_the_norm_of_the_whole(ranks: RankPool) -> None:
    ((norm, by_hand),) = ranks.run(1, sharded_update_of_one, "cpu", init_group=False)
    assert norm == pytest.approx(by_hand, rel=1e-5)


def check_talk(results: list[tuple[str, list[float], list[list[int]]]]) -> None:
    for rank, (payload, sums, heard) in enumerate(results):
        assert payload == "cpu", "nothing that both take part in goes through the device"
        assert sums == [float(turn) for turn in range(TURNS)]
        assert heard == [[10 * (1 - rank) + turn] * 3 for turn in range(TURNS)]


def test_ranks_that_share_a_device_talk_through_host_memory(ranks: RankPool) -> None:
    check_talk(ranks.run(2, sum_alone_and_talk, "cpu", init_group=False))


def payloads() -> list[str]:
    """Where payload comes from: in a group of ranks that share a device, and in one whose ranks have their own."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)
    transport = Transport(torch.device("meta"), timeout_s=60, sharing={2: 1})
    for ranks in ((1, 2), (0,)):
        transport.add_process_group(ranks)
    return [str(group.payload_device) for group in transport._groups.values()]


def test_only_ranks_that_share_a_device_avoid_it(ranks: RankPool) -> None:
    assert ranks.run(3, payloads, init_group=False) == [["cpu", "cpu", "meta"]] * 3


def test_a_rank_reads_weights_in_the_memory_of_another(ranks: RankPool) -> None:
    _, found = ranks.run(2, read_weights_of_the_other, "cpu", init_group=False)
    assert found == [name for name, _ in own_weights(torch.device("cpu"))]
