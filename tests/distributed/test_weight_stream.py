"""Weights arrive, provably: complete, of the right version, and never damaged, whoever holds and wants what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast
from unittest.mock import patch

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.counts import counting_traffic
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.engines import CopyDriver, make_external
from tests.tiny import tiny_model
from tests.unit.distributed.test_weight_route import columns, in_pairs
from torch import Tensor

from leaderless.config.models import ModelConfig
from leaderless.distributed.activity import Activity
from leaderless.distributed.in_flight import PendingMessage, RoundUnderWay
from leaderless.distributed.one_sided.messages import ADDRESSES
from leaderless.distributed.transport import ProcessGroup, Round, Transport
from leaderless.distributed.weights import delivery
from leaderless.distributed.weights import route as routes
from leaderless.distributed.weights.blocks import (
    HeldWeights,
    LocalWeight,
    Placement,
    Pool,
    Shape,
    even_rows,
    everything,
    shard_rows,
    whole_block,
)
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import (
    NO_VERSION,
    Probe,
    WeightStream,
    fill_weights,
    receive_weights,
    send_weights,
)
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.planner import Layout
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.weight_sources import Colocated, Fed
from leaderless.training.fsdp import make_engine

WORLD_SIZE = 4
VERSION = 7


@dataclass(frozen=True)
class Case:
    """Who holds what, who wants what, and the size of a bucket."""

    shapes: list[Shape]
    holders: Pool
    takers: Pool
    dtype: torch.dtype
    bucket_bytes: int
    gathers: bool = True

    @property
    def is_gathered(self) -> bool:
        return self.gathers and self.takers.placement is everything


ranks_of = st.lists(st.integers(0, WORLD_SIZE - 1), min_size=1, unique=True).map(lambda ranks: tuple(sorted(ranks)))


def pools(*placements: Placement) -> st.SearchStrategy[Pool]:
    return st.builds(
        lambda ranks, placement: Pool(Layout(ranks, len(ranks)), placement), ranks_of, st.sampled_from(placements)
    )


cases = st.builds(
    Case,
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6),
    pools(even_rows, everything, columns, in_pairs),
    pools(everything, everything, even_rows, columns, in_pairs),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 100, 1 << 25]),
    st.sampled_from([True, True, False]),
)


def whole(index: int, shape: Shape) -> Tensor:
    """A weight whose elements differ, also in bfloat16."""
    return torch.arange(math.prod(shape)).remainder(250).view(shape).float() + index


def route_of(case: Case, rank: int) -> WeightRoute:
    shapes = {f"weight {index}": shape for index, shape in enumerate(case.shapes)}
    return WeightRoute(
        "weights of role 'policy'", shapes, case.holders, case.takers, case.dtype, rank, is_gathered=case.is_gathered
    )


def held_by(case: Case, pool: Pool, rank: int, *, is_empty: bool = False) -> HeldWeights | None:
    """What a rank of a pool has of each weight."""
    if rank not in pool.layout:
        return None
    weights: list[LocalWeight] = []
    for index, shape in enumerate(case.shapes):
        block = pool.block(f"weight {index}", shape, rank)
        local = block.view(whole(index, shape), whole_block(shape)).clone()
        local = torch.full_like(local, -1, dtype=case.dtype) if is_empty else local
        weights.append(LocalWeight(f"weight {index}", shape, block, local))
    return HeldWeights.of(weights, VERSION)


def bring(case: Case, transport: Transport) -> tuple[dict[str, Tensor], int]:
    """What arrives on this rank, and its policy version."""
    route = route_of(case, transport.rank)
    held = held_by(case, case.holders, transport.rank)
    for ranks in (route.ranks, case.takers.layout.ranks):
        transport.add_process_group(ranks)
    if transport.rank not in route.ranks:
        return {}, VERSION
    group = transport.process_group(route.ranks)
    if transport.rank not in case.takers.layout:
        assert held is not None
        send_weights(route, held, group)
        return {}, VERSION
    if not case.is_gathered:
        target = held_by(case, case.takers, transport.rank, is_empty=True)
        assert target is not None
        version = fill_weights(route, target, group, held)
        return {name: weight.local for name, weight in target.weights.items()}, version
    stream = receive_weights(route, group, transport.process_group(case.takers.layout.ranks), held)
    arrived: dict[str, Tensor] = {}
    try:
        for name, tensor in stream:
            arrived[name] = tensor.clone()
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {len(arrived)} weights have come") from error
    return arrived, stream.policy_version


def bring_all(examples: list[Case]) -> list[int]:
    """Check what arrives; the bytes that this rank receives from holders, by case."""
    transport, received = Transport(torch.device("cpu"), 60), list[int]()
    for case in examples:
        with patch.object(routes, "BUCKET_BYTES", case.bucket_bytes), counting_traffic() as traffic:
            arrived, version = bring(case, transport)
        gets_nothing = all(math.prod(tensor.shape) == 0 for tensor in arrived.values()) and arrived
        assert version == (NO_VERSION if gets_nothing else VERSION)
        if transport.rank in case.takers.layout:
            assert list(arrived) == [f"weight {index}" for index in range(len(case.shapes))]
            for index, shape in enumerate(case.shapes):
                block = case.takers.block(f"weight {index}", shape, transport.rank)
                expected = block.view(whole(index, shape), whole_block(shape)).to(case.dtype)
                found = arrived[f"weight {index}"]
                assert found.dtype == case.dtype
                assert torch.equal(found, expected), (case, index)
        received.append(traffic.received)
    return received


ALL = Layout(tuple(range(WORLD_SIZE)), WORLD_SIZE)
HELD_BY_ALL = Case([(3, 2), (1,)], Pool(ALL, everything), Pool(ALL, everything), torch.bfloat16, 1 << 25)


@settings(max_examples=6)
@example(examples=[HELD_BY_ALL])
@given(examples=st.lists(cases, min_size=8, max_size=8))
def test_every_rank_gets_what_it_wants_whoever_holds_it(ranks: RankPool, examples: list[Case]) -> None:
    by_rank = ranks.run(WORLD_SIZE, bring_all, examples)
    for case, *received in zip(examples, *by_rank, strict=True):
        num_bytes = case.dtype.itemsize * sum(map(math.prod, case.shapes))
        num_messages = WORLD_SIZE**2 * len(case.shapes) * (9 if case.bucket_bytes == 1 else 3)
        if case.is_gathered:
            assert sum(received) <= num_bytes + 24 * num_messages, "no element leaves its holder twice"
        if case.holders.layout == case.takers.layout and case.holders.placement is even_rows:
            assert case.takers.placement not in (everything, even_rows) or sum(received) == 0


CASE = Case(
    [(9, 4), (5,), (6, 2, 2)],
    Pool(Layout((0, 1), 2), even_rows),
    Pool(Layout((2, 3), 2), everything),
    torch.float32,
    1 << 25,
)


def waits_for_weights(model: str) -> set[str]:
    """Weights that a rank waits for while it reads its own whole, and while its engine gets them."""
    transport, names = Transport(torch.device("cpu"), timeout_s=60), set[str]()
    layout, waiting = Layout((0, 1), 2), Activity.waiting

    def record(activity: Activity, what: str) -> AbstractContextManager[None]:
        names.add(what)
        return waiting(activity, what)

    trainer = make_engine(setup_of(transport, layout, model))
    serving = Colocated(make_external(CopyDriver(model), model), trainer, Pool(layout, shard_rows), torch.float32)
    with patch.object(Activity, "waiting", record):
        assert [*trainer.full_weights()]
        with serving.phase():
            pass
    return {name for name in names if "weights" in name}


def test_weights_that_a_rank_waits_for_have_a_name_that_is_no_role(ranks: RankPool) -> None:
    for names in ranks.run(2, waits_for_weights, tiny_model()):
        assert names == {"whole weights", "the trainer's weights"}


def versions_kept(model: str) -> list[int | None]:
    """Version of a rank's engine after a phase, and after ranks have released it: one of its two, then both."""
    transport, layout = Transport(torch.device("cpu"), timeout_s=60), Layout((0, 1), 2)
    trainer, config = make_engine(setup_of(transport, layout, model)), ModelConfig(path=model)
    engine = NativeEngine(
        load_causal_lm(config, "policy"), load_tokenizer(config, "policy"), frozenset({0}), 8, torch.device("cpu")
    )
    serving, found = Colocated(engine, trainer, Pool(layout, shard_rows), torch.float32), list[int | None]()
    for ranks in ((), (0,), (0, 1)):
        with serving.phase():
            assert all(parameter.numel() for parameter in engine.model.parameters())
        serving.release(frozenset(ranks))
        found.append(engine.policy_version)
    assert not any(parameter.numel() for _, parameter in engine.model.trained_weights())
    with serving.phase():
        assert all(parameter.numel() for parameter in engine.model.parameters())
    return found


def test_an_engine_keeps_weights_for_a_further_phase_until_all_of_its_ranks_need_the_memory(ranks: RankPool) -> None:
    for found in ranks.run(2, versions_kept, tiny_model()):
        assert found == [0, 0, None]


def bring_damaged(second_leg: bool) -> str:
    """The error if one byte changes on the way to rank 2."""
    transport = Transport(torch.device("cpu"), 5)
    exchanging, wait = ProcessGroup.exchanging, PendingMessage.wait

    def damaged(self: ProcessGroup, rounds: Iterable[Round], what: str) -> Iterator[None]:
        if what == ADDRESSES:  # with NIXL, ranks tell them one another before they move weights
            yield from exchanging(self, rounds, what)
            return
        arrived: list[Tensor] = []

        def watched() -> Iterator[Round]:
            for sent, received in rounds:
                arrived.extend(message for _, message in received)
                yield sent, received

        for _ in exchanging(self, watched(), what):
            for message in arrived:
                message[len(message) // 3] ^= 1
            yield

    def damaged_gather(self: PendingMessage) -> Tensor:
        gathered = wait(self)
        gathered[1, 11] ^= 1
        return gathered

    is_here = transport.rank == 2
    with (
        patch.object(ProcessGroup, "exchanging", damaged if is_here and not second_leg else exchanging),
        patch.object(PendingMessage, "wait", damaged_gather if is_here and second_leg else wait),
    ):
        try:
            bring(CASE, transport)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_damaged_message_is_refused(ranks: RankPool) -> None:
    first, second, damaged, other = ranks.run(WORLD_SIZE, bring_damaged, False)
    assert (first, second) == ("", "")
    assert "rank 2: weights of role 'policy' from rank 0 arrived damaged" in damaged
    assert "rank 3: weights of role 'policy' did not reach rank 2 well" in other, "no rank uses them"
    assert damaged.endswith("0 weights have come")
    assert other.endswith("0 weights have come")
    *others, damaged, last = ranks.run(WORLD_SIZE, bring_damaged, True)
    assert (*others, last) == ("", "", "")
    assert "rank 2: weights of role 'policy' from rank 3 arrived damaged" in damaged


def bring_late(where: str) -> tuple[str, int, int]:
    """Like `bring`, where the host reads late what a device has compared: the error, and how often the host reads.

    One byte of the last message to rank 2, or of the last that it gathers, changes on the way. Every row is a message.
    """
    transport, num_reads = Transport(torch.device("cpu"), 5), 0
    finish, wait, read = ProcessGroup._finish, PendingMessage.wait, delivery.WeightDelivery._read
    is_here = transport.rank == 2
    left = {"message": 0, "gather": 0}

    def damaged_round(self: ProcessGroup, under_way: RoundUnderWay, what: str) -> None:
        finish(self, under_way, what)
        if what == "weights of role 'policy'" and under_way.received:
            left["message"] -= 1
            if left["message"] == 0:
                under_way.received[0][0][0] ^= 1

    def damaged_gather(self: PendingMessage) -> Tensor:
        gathered = wait(self)
        left["gather"] -= 1
        if left["gather"] == 0:
            gathered[1, 3] ^= 1
        return gathered

    def counted(self: delivery.WeightDelivery, found: Sequence[delivery.Found]) -> None:
        nonlocal num_reads
        num_reads += 1
        read(self, found)

    case = replace(CASE, bucket_bytes=1)
    with patch.object(routes, "BUCKET_BYTES", 1):
        if is_here and where:
            legs = route_of(case, 2).legs(1)
            left[where] = sum(bool(leg.received) for leg in legs) if where == "message" else len(legs)
        with (
            patch.object(ProcessGroup, "_finish", damaged_round),
            patch.object(PendingMessage, "wait", damaged_gather),
            patch.object(delivery, "_is_read_late", lambda _: True),
            patch.object(delivery.WeightDelivery, "_read", counted),
        ):
            try:
                arrived, version = bring(case, transport)
            except RuntimeError as error:
                return str(error), num_reads, 0
    if transport.rank in case.takers.layout:
        assert version == VERSION
        for index, shape in enumerate(case.shapes):
            assert torch.equal(arrived[f"weight {index}"], whole(index, shape))
    return "", num_reads, len(route_of(case, transport.rank).legs(1))


def test_the_host_reads_twice_what_an_accelerator_has_found_about_all_messages(ranks: RankPool) -> None:
    for error, num_reads, num_buckets in ranks.run(WORLD_SIZE, bring_late, "")[2:]:
        assert error == ""
        assert (num_reads, num_buckets) == (2, 5 + 3 + 3), "the first one has the version"


def test_the_last_message_that_is_damaged_is_named_before_the_weights_are_used(ranks: RankPool) -> None:
    (*_, damaged, other) = ranks.run(WORLD_SIZE, bring_late, "message")
    assert "rank 2: weights of role 'policy' from rank 0 arrived damaged: the checksum of 'weight 2' " in damaged[0]
    assert "rank 3: weights of role 'policy' did not reach rank 2 well" in other[0]
    (*_, damaged, other) = ranks.run(WORLD_SIZE, bring_late, "gather")
    assert "rank 2: weights of role 'policy' from rank 3 arrived damaged: the checksum of 'weight 2' " in damaged[0]
    assert (damaged[1], other[0]) == (2, "")


def bring_mixed_versions() -> str:
    """The error if the trained ranks are not at the same update."""
    transport = Transport(torch.device("cpu"), 5)
    with patch(f"{__name__}.VERSION", VERSION + transport.rank):
        try:
            bring(CASE, transport)
        except RuntimeError as error:
            return str(error)
    return ""


def test_weights_of_several_versions_are_never_mixed(ranks: RankPool) -> None:
    first, second, *takers = ranks.run(WORLD_SIZE, bring_mixed_versions)
    assert (first, second) == ("", "")
    for rank, message in enumerate(takers, 2):
        assert f"rank {rank}: weights of role 'policy' are of policy versions 7 and 8" in message


def bring_misplaced() -> str:
    """The error if a rank does not hold what the layout says."""
    transport = Transport(torch.device("cpu"), 5)
    held = held_by(CASE, Pool(CASE.holders.layout, columns), transport.rank)
    try:
        assert held is not None
        send_weights(route_of(CASE, transport.rank), held, transport.world)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_holds_something_else_is_noticed_before_anything_is_sent(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(2, bring_misplaced)):
        assert f"rank {rank}: holds WeightBlock(offsets=(0, {2 * rank}), sizes=(9, 2)) of 'weight 0' (9, 4)" in message
        assert "correct the placement of its back end" in message


class Reader:
    """An engine that reads only some of the weights that come."""

    policy_version = NO_VERSION

    def __init__(self, num_read: int) -> None:
        self.num_read, self.read = num_read, list[str]()
        self.probe: Probe | None = None

    def wake(self, reload: Callable[[], None]) -> None:
        """Be awake already."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        self.probe, self.read = weights.probe, [name for name, _ in islice(weights, self.num_read)]
        self.policy_version = weights.policy_version


def feed() -> tuple[list[str], Probe | None, int]:
    """What engines on ranks 2 and 3 have read, the former only the first weight."""
    transport = Transport(torch.device("cpu"), 20)
    for layout in (CASE.holders.layout, CASE.takers.layout):
        transport.add_process_group(layout.ranks)
    with patch.object(routes, "BUCKET_BYTES", 1):
        route = route_of(CASE, transport.rank)
        if transport.rank in CASE.holders.layout:
            held = held_by(CASE, CASE.holders, transport.rank)
            assert held is not None
            send_weights(route, held, transport.world)
            return [], None, NO_VERSION
        engine = Reader(1 if transport.rank == 2 else len(CASE.shapes))
        serving = Fed(cast("RolloutEngine", engine), route, transport.process_group(CASE.takers.layout.ranks))
        serving.receive(transport.world, None, Probe([1, 2], torch.ones(1)))
    return engine.read, engine.probe, serving.policy_version


def fetch() -> tuple[list[str], list[str], int]:
    """What engines on ranks 2 and 3 have read when their thread has received weights, and after these are loaded."""
    transport = Transport(torch.device("cpu"), 20)
    for layout in (CASE.holders.layout, CASE.takers.layout):
        transport.add_process_group(layout.ranks)
    route = route_of(CASE, transport.rank)
    if transport.rank in CASE.holders.layout:
        held = held_by(CASE, CASE.holders, transport.rank)
        assert held is not None
        send_weights(route, held, transport.world)
        return [], [], NO_VERSION
    engine, takers = Reader(len(CASE.shapes)), transport.process_group(CASE.takers.layout.ranks)
    serving = Fed(cast("RolloutEngine", engine), route, takers)
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(serving.fetch, transport.world, takers, None).result()
    before = [*engine.read, *([] if serving.policy_version == NO_VERSION else ["a version"])]
    load()
    return before, engine.read, serving.policy_version


def test_weights_that_a_thread_has_received_are_loaded_when_it_is_asked_for(ranks: RankPool) -> None:
    names = [f"weight {index}" for index in range(len(CASE.shapes))]
    assert ranks.run(WORLD_SIZE, fetch)[2:] == [([], names, VERSION)] * 2


def test_an_engine_that_reads_less_leaves_no_other_rank_waiting(ranks: RankPool) -> None:
    *_, some, whole = ranks.run(WORLD_SIZE, feed)
    names = [f"weight {index}" for index in range(len(CASE.shapes))]
    assert (some[0], whole[0]) == (names[:1], names)
    for _, probe, version in (some, whole):
        assert version == VERSION
        assert probe is not None
        assert (probe.tokens, probe.log_probs.tolist()) == ([1, 2], [1.0])
