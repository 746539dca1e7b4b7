"""Weights that are sent while training changes them: the copies arrive as the originals were, or the rank is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
from tests.distributed.ranks import RankPool
from torch import Tensor

from leaderless.distributed.activity import Activity
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.distributed.weights import copies
from leaderless.distributed.weights import route as routes
from leaderless.distributed.weights.blocks import (
    HeldWeights,
    LocalWeight,
    Placement,
    Pool,
    even_rows,
    everything,
    whole_block,
)
from leaderless.distributed.weights.copies import begin_copy
from leaderless.distributed.weights.delivery import WeightDelivery
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import WeightStream, receive_weights, send_weights
from leaderless.distributed.weights.tensor_parallel import stage_rows, tensor_rows
from leaderless.planner import Layout
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.weight_sources import Fed
from leaderless.worker.asynchronous.channels import Inbox, Note

VERSION = 7
SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.0.mlp.up_proj.lora_A": (2, 4),
    "model.layers.0.mlp.up_proj.lora_B": (6, 2),
    "model.layers.1.mlp.down_proj.weight": (4, 6),
    "model.norm.weight": (5,),
}
HOLDERS: dict[str, tuple[Layout, Placement]] = {
    "one rank": (Layout((0,), 1), everything),
    "two shards": (Layout((0, 1), 2), even_rows),
    "three shards": (Layout((0, 1, 2), 3), even_rows),
    "tensor parallel": (Layout((0, 1), 1, tp=2), tensor_rows),
    "a pipeline": (Layout((0, 1), 1, pp=2), stage_rows(SHAPES)),
    "shards of others": (Layout((1, 2), 2), even_rows),
}


def whole(name: str) -> Tensor:
    """A weight of which bfloat16 keeps no element exactly."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(SHAPES[name], generator=generator) + 1.001


def held_by(pool: Pool, rank: int) -> HeldWeights:
    weights: list[LocalWeight] = []
    for name, shape in SHAPES.items():
        block = pool.block(name, shape, rank)
        weights.append(LocalWeight(name, shape, block, block.view(whole(name), whole_block(shape)).clone()))
    return HeldWeights.of(weights, VERSION)


def bring(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What arrives on this rank of copies whose originals have changed meanwhile."""
    transport = Transport(torch.device("cpu"), 20)
    holders = Pool(*HOLDERS[case])
    free = tuple(rank for rank in (2, 3) if rank not in holders.layout)
    takers = Pool(Layout(free, len(free)), everything)
    route = WeightRoute("weights of role 'policy'", SHAPES, holders, takers, dtype, transport.rank, is_gathered=True)
    for ranks in (route.ranks, takers.layout.ranks):
        transport.add_lane("weights", ranks)
    if transport.rank not in route.ranks:
        return {}
    lane = transport.lane("weights", route.ranks)
    if transport.rank in holders.layout:
        held = held_by(holders, transport.rank)
        copy = begin_copy(held, dtype)
        for weight in held.weights.values():
            weight.local.fill_(math.nan)
        send_weights(route, copy.wait(), lane)
        return {}
    stream = receive_weights(route, lane, transport.lane("weights", takers.layout.ranks))
    arrived = {name: tensor.clone() for name, tensor in stream}
    assert stream.policy_version == VERSION
    return arrived


@pytest.mark.parametrize("case", HOLDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_what_was_held_when_the_copy_began(ranks: RankPool, case: str, dtype: torch.dtype) -> None:
    *_, arrived = ranks.run(4, bring, case, dtype)
    assert list(arrived) == list(SHAPES)
    for name, tensor in arrived.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, whole(name).to(dtype)), name


def receive_from_a_rank_that_stops() -> str:
    """The error of this rank when rank 1 stops after one of several buckets; rank 2 receives in a thread."""
    transport = Transport(torch.device("cpu"), 1.0)
    holders, takers = Pool(Layout((0, 1), 2), even_rows), Pool(Layout((2,), 1), everything)
    route = WeightRoute(
        "weights of role 'policy'", SHAPES, holders, takers, torch.float32, transport.rank, is_gathered=True
    )
    transport.add_lane("weights", (0, 1, 2))
    transport.add_lane("weights", (2,))
    lane = transport.lane("weights", (0, 1, 2))

    def fetch(iteration: int) -> Note:
        for _ in receive_weights(route, lane, transport.lane("weights", (2,))):
            pass
        return Note(iteration).exchange(lane, "policy=>rollout")

    try:
        with patch.object(routes, "BUCKET_BYTES", 1):
            if transport.rank == 2:
                box = Inbox("the weights", fetch, 10.0, Activity())
                box.begin(4)
                box.take()
            elif transport.rank == 1:
                next(WeightDelivery(route, held_by(holders, 1), lane).deliver(lambda _: {}))
            else:
                send_weights(route, begin_copy(held_by(holders, 0), torch.float32).wait(), lane)
                Note(4).exchange(lane, "policy=>rollout")
    except RuntimeError as error:
        return str(error)
    transport.store().wait(["given up/2"])  # what has stopped says nothing more, but does not end before
    return ""


def test_a_rank_that_stops_in_the_middle_of_weights_is_named_where_they_are_taken(ranks: RankPool) -> None:
    _, stopped, error = ranks.run(3, receive_from_a_rank_that_stops)
    assert stopped == ""
    assert "rank 2 waited for weights of role 'policy' with ranks [0, 1]; nothing is heard of rank 1" in error


class Event:
    """Stands in for a place in the work of an accelerator."""

    log: list[str]

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_host_does_not_wait_for_an_accelerator_before_copies_are_sent(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    log, empty, pinned = list[str](), torch.empty, list[object]()

    def recorded(size: int, *, pin_memory: bool = False, **options: object) -> Tensor:
        pinned.extend([(size, pin_memory)] * (size > 0))
        return empty(size, **options)  # type: ignore[call-overload,no-any-return]

    def copied(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        log.append(f"copy {tuple(other.shape)} {other.dtype}{'' if non_blocking else ', waiting'}")
        return self

    held = held_by(Pool(Layout((0, 1), 2), even_rows), 0)
    there = [LocalWeight(one.name, one.shape, one.block, one.local.to("meta")) for one in held.weights.values()]
    monkeypatch.setattr(copies, "can_pin", lambda kind: is_pinned and kind == "meta")
    monkeypatch.setattr(copies.torch, "empty", recorded)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    monkeypatch.setattr(Event, "log", log, raising=False)
    copy = begin_copy(HeldWeights.of(there, VERSION), torch.bfloat16)
    sizes = [tuple(weight.local.shape) for weight in held.weights.values()]
    assert log == [*(f"copy {size} torch.bfloat16" for size in sizes), "record"], "it converts before they cross"
    num_bytes = sum(-(-2 * math.prod(size) // copies.ALIGNMENT) * copies.ALIGNMENT for size in sizes)
    assert pinned == [(num_bytes, is_pinned)], "one block for all"
    assert copy.wait().policy_version == VERSION
    assert log[-1] == "wait"


class Taking:
    """An engine that keeps the weights that it is given."""

    def __init__(self) -> None:
        self.policy_version, self.taken = 0, list[tuple[str, Tensor]]()

    def wake(self, reload: Callable[[], None]) -> None:
        """Be awake already."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        self.taken, self.policy_version = list(weights), weights.policy_version


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("meta", True), ("meta", False)])
def test_weights_that_come_are_in_few_blocks_of_pinned_memory_where_an_accelerator_reads_them(
    monkeypatch: pytest.MonkeyPatch, device: str, is_pinned: bool
) -> None:
    empty, blocks = torch.empty, list[int]()

    def recorded(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        if pin_memory:
            blocks.append(size)
        return empty(size, dtype=dtype)

    weights = {name: whole(name).bfloat16() for name in SHAPES}
    pools = Pool(Layout((0,), 1), everything), Pool(Layout((1,), 1), everything)
    route = WeightRoute("weights of role 'policy'", SHAPES, *pools, torch.bfloat16, 1, is_gathered=True)
    engine, lane = Taking(), ProcessGroup((0, 1), 1)
    serving = Fed(cast("RolloutEngine", engine), route, ProcessGroup((1,), 1, payload_device=torch.device(device)))
    monkeypatch.setattr(copies, "can_pin", lambda _: is_pinned)
    monkeypatch.setattr(copies.torch, "empty", recorded)
    monkeypatch.setattr(copies, "PINNED_BYTES", 50)
    stream = WeightStream(iter(weights.items()), VERSION)
    with patch("leaderless.rollout.weight_sources.receive_weights", return_value=stream):
        load = serving.fetch(lane, lane, None)
    load()
    assert [name for name, _ in engine.taken] == list(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.taken)
    # Of 64, 48, 16 + 24, 48 and 10 bytes, each rounded up to whole 16.
    assert blocks == ([64, 50, 50, 50, 16] if is_pinned else [])
