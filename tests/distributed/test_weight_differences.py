"""Weights that come as differences are those that come whole, bit by bit, and a rank without a base gets the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, cast
from unittest.mock import patch

import pytest
import torch
from tests.distributed.ranks import RankPool
from torch import Tensor

from leaderless.distributed.transport import Transport
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
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.sent import SentWeights, Traffic
from leaderless.distributed.weights.stream import WeightStream, send_weights
from leaderless.distributed.weights.tensor_parallel import tensor_rows
from leaderless.planner import Layout
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.weight_sources import Fed

SHAPES = {
    "model.embed_tokens.weight": (65, 32),
    "model.layers.0.mlp.up_proj.weight": (48, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 48),
    "model.layers.0.norm.weight": (33,),
    "model.norm.weight": (1,),
}
HOLDERS: dict[str, tuple[Layout, Placement]] = {
    "shards": (Layout((0, 1), 2), even_rows),
    "tensor parallel": (Layout((0, 1), 1, tp=2), tensor_rows),
    "one rank": (Layout((0,), 1), everything),
}
TAKERS = {"one engine": Layout((2,), 1), "two engines": Layout((2, 3), 2), "also trains": Layout((1, 2), 2)}
Kind = Literal["native", "restarts", "other"]
KINDS: list[Kind] = ["native", "restarts", "other"]
DTYPE = torch.bfloat16
EVENTS = ["", "", "missed", "", "resumed", "", "", "rerouted", "", "same"]
"""What happens before each send: the takers lose what they have, the holders do, or both get another route."""
WHOLE = [True, False, True, False, True, False, False, True, False, False]
"""Whether all numbers are sent."""
BUCKET_BYTES = 1 << 11


def whole(name: str, version: int) -> Tensor:
    """A weight in float32, of which an update changes a few numbers in half precision, and moves all of them."""
    generator = torch.Generator().manual_seed(len(name))
    weight = torch.randn(SHAPES[name], generator=generator)
    for _ in range(version):
        weight = weight + 1e-4 * weight.abs() * torch.randn(SHAPES[name], generator=generator)
    return weight


class Engine:
    """An engine that has weights as they were sent, or only in a form of its own."""

    def __init__(self) -> None:
        self.policy_version: int | None = None
        self.weights = dict[str, Tensor]()

    def wake(self, reload: object) -> None:
        """Be awake already."""

    def own_weights(self) -> Mapping[str, Tensor]:
        return self.weights

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        self.policy_version = None
        for name, tensor in weights:
            self.weights[name] = tensor.clone()
        self.policy_version = weights.policy_version


class Rank:
    """One rank of a route, through a run."""

    def __init__(self, transport: Transport, holders: Pool, takers: Layout, kind: Kind) -> None:
        self.transport, self.holders, self.takers, self.kind = transport, holders, Pool(takers, everything), kind
        self.engine = Engine()
        self.begin()

    def begin(self) -> None:
        """Start, or start again."""
        rank = self.transport.rank
        self.route, self.fed = self.new_route(), None
        if rank in self.takers.layout:
            group = self.transport.process_group(self.takers.layout.ranks)
            self.fed = Fed(
                cast("RolloutEngine", self.engine),
                self.route,
                group,
                may_restart=self.kind == "restarts",
                own=self.engine.own_weights if self.kind == "native" else None,
            )

    def new_route(self) -> WeightRoute:
        """A route on which nothing has been sent yet."""
        rank = self.transport.rank
        route = WeightRoute(
            "weights of role 'policy'", SHAPES, self.holders, self.takers, DTYPE, rank, is_gathered=True
        )
        route.sent = SentWeights()
        return route

    def happens(self, event: str) -> None:
        """Lose what the rank has, as it does in a run."""
        rank = self.transport.rank
        if event == "missed" and rank == self.takers.layout.ranks[-1]:
            self.begin()
        if event == "resumed" and rank in self.holders.layout and self.fed is None:
            self.route = self.new_route()
        if event == "rerouted":
            self.route = self.new_route()
            if self.fed is not None:
                self.fed.reroute(self.route)

    def bring(self, version: int, *, is_fetched: bool) -> Traffic:
        """Send or receive a version; the messages that were sent."""
        held = self.held(version) if self.transport.rank in self.holders.layout else None
        group = self.transport.process_group(self.route.ranks)
        if self.fed is None:
            assert held is not None
            send_weights(self.route, begin_copy(held, DTYPE).wait() if is_fetched else held, group)
        elif is_fetched:
            self.fed.fetch(group, self.transport.process_group(self.takers.layout.ranks), None)()
        else:
            self.fed.receive(group, held, None)
        return (self.route if self.fed is None else self.fed.route).take_traffic()

    def held(self, version: int) -> HeldWeights:
        weights: list[LocalWeight] = []
        for name, shape in SHAPES.items():
            block = self.holders.block(name, shape, self.transport.rank)
            weights.append(LocalWeight(name, shape, block, block.view(whole(name, version), whole_block(shape))))
        return HeldWeights.of(weights, version)


def bring_all(holders: str, takers: str, kind: Kind, is_fetched: bool) -> list[Traffic]:
    """What this rank sends of each version."""
    transport, found = Transport(torch.device("cpu"), 60), list[Traffic]()
    pool, layout = Pool(*HOLDERS[holders]), TAKERS[takers]
    ranks = tuple(sorted({*pool.layout.ranks, *layout.ranks}))
    for group in (ranks, layout.ranks):
        transport.add_process_group(group)
    if transport.rank not in ranks:
        return []
    with patch.object(routes, "BUCKET_BYTES", BUCKET_BYTES):
        rank = Rank(transport, pool, layout, kind)
        for index, event in enumerate(EVENTS):
            rank.happens(event)
            version = index - (event == "same")
            found.append(rank.bring(version, is_fetched=is_fetched))
            if rank.fed is not None:
                assert rank.fed.policy_version == rank.engine.policy_version == version
                for name, tensor in rank.engine.weights.items():
                    expected = whole(name, version).to(DTYPE)
                    assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), (index, name)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("holders", "takers", "is_fetched"),
    [
        ("shards", "one engine", False),
        ("shards", "two engines", False),
        ("tensor parallel", "two engines", True),
        ("one rank", "two engines", False),
        ("shards", "also trains", False),
    ],
)
def test_weights_are_those_that_were_sent_whatever_has_been_lost(
    ranks: RankPool, holders: str, takers: str, kind: Kind, is_fetched: bool
) -> None:
    by_rank = [found for found in ranks.run(4, bring_all, holders, takers, kind, is_fetched) if found]
    num_bytes = 2 * sum(map(math.prod, SHAPES.values()))
    for index, (event, is_whole) in enumerate(zip(EVENTS, WHOLE, strict=True)):
        sent = sum((found[index] for found in by_rank), start=Traffic())
        changed = (
            sum(int((whole(name, index).to(DTYPE) != whole(name, index - 1).to(DTYPE)).sum()) for name in SHAPES)
            if index
            else 0
        )
        assert sent.whole_bytes <= num_bytes + 40 * 24
        if is_whole:
            assert (sent.num_bytes, sent.num_compared) == (sent.whole_bytes, 0), event
        elif event == "same":
            assert sent.num_changed == 0
            assert sent.num_bytes < sent.whole_bytes / 4
        else:
            assert 0 < sent.num_changed <= changed
            assert sent.num_compared <= num_bytes // 2
            assert sent.num_bytes < sent.whole_bytes / 2, "a few percent of the numbers have changed"
            if takers != "also trains":
                assert (sent.num_changed, sent.num_compared) == (changed, num_bytes // 2)


def bring_to_a_wrong_base() -> tuple[str, bool]:
    """The error of this rank if a base is not what was sent, and whether an engine has changed."""
    transport = Transport(torch.device("cpu"), 20)
    pool, layout = Pool(*HOLDERS["shards"]), TAKERS["two engines"]
    for group in ((0, 1, 2, 3), layout.ranks):
        transport.add_process_group(group)
    rank = Rank(transport, pool, layout, "native")
    rank.bring(1, is_fetched=False)
    before = dict[str, Tensor]()
    if transport.rank == 2:
        rank.engine.weights["model.embed_tokens.weight"][0, 0] += 1
        before = {name: tensor.clone() for name, tensor in rank.engine.weights.items()}
    try:
        rank.bring(2, is_fetched=False)
    except RuntimeError as error:
        has_changed = any(not torch.equal(before[name], rank.engine.weights[name]) for name in before)
        return str(error), has_changed
    return "", False


def test_a_base_that_was_not_sent_is_found_by_the_checksum_of_the_whole(ranks: RankPool) -> None:
    first, second, wrong, other = ranks.run(4, bring_to_a_wrong_base)
    assert (first, second) == (("", False), ("", False))
    assert "rank 2: weights of role 'policy' from rank 0 arrived damaged" in wrong[0]
    assert not wrong[1], "the engine has what it had"
    assert "rank 3: weights of role 'policy' did not reach rank 2 well" in other[0]
