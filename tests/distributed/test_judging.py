"""Judges of other ranks, asked by ranks with different numbers of questions, some of them equal."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.counts import counting_traffic
from tests.distributed.ranks import RankPool
from tests.unit.worker.test_judging import NativeServing, asker, questions, read_nothing, read_points

from leaderless.data.buffer.block_exchange import exchange_unannounced
from leaderless.distributed.transport import Transport
from leaderless.rollout.wrapped_engine import ALONE
from leaderless.worker.build.judging import AskerOfOthers


@dataclass(frozen=True)
class Case:
    """Ranks that judge, how many of them make one engine, and the number of questions of each rank."""

    judging: tuple[int, ...]
    per_engine: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """Verdicts and words for the questions of a rank, the requests to its engine, and the most that it was sent."""

    worth: list[tuple[object, str, bool]]
    num_requests: int = 0
    num_bytes: int = 0


CASES = {
    "one rank": Case((0,), 1, (9,)),
    "the other rank judges": Case((1,), 1, (9, 0)),
    "nobody asks": Case((0, 1), 1, (0, 0)),
    "those that judge ask, too": Case((1, 2), 1, (3, 7, 0)),
    "all ask all": Case((0, 1, 2, 3), 1, (12, 0, 5, 1)),
    "two ranks make an engine": Case((2, 3), 2, (8, 3, 0, 0)),
    "two engines of two ranks": Case((0, 1, 2, 3), 2, (2, 0, 6, 11)),
}


def judge_of(case: Case, transport: Transport, serving: NativeServing) -> AskerOfOthers:
    """What asks; all ranks make it together."""
    engines = [case.judging[at : at + case.per_engine] for at in range(0, len(case.judging), case.per_engine)]
    for ranks in (case.judging, *engines):
        transport.add_process_group(ranks)
    own = None
    if transport.rank in case.judging:
        shard = next(ranks for ranks in engines if transport.rank in ranks)
        groups = [transport.process_group(ranks) for ranks in (case.judging, shard)]
        own = asker(serving, ranks=groups[0], shard=groups[1] if len(shard) > 1 else ALONE)
    return AskerOfOthers(transport.world, case.judging, own, read_points)


def ask_each_other(cases: dict[str, Case]) -> dict[str, Found]:
    """What this rank hears in each case; its last question is asked twice."""
    transport, found = Transport(torch.device("cpu"), timeout_s=60), {}
    for name, case in cases.items():
        serving = NativeServing()
        others = judge_of(case, transport, serving)
        mine = questions(case.counts[transport.rank], read_nothing)  # those that ask do not read
        with counting_traffic() as traffic:
            replies = others.ask([*mine, *mine[-1:]], list[str]().append)
        worth = [(one.verdict, one.said, one.error is None) for one in replies]
        found[name] = Found(worth, serving.num_requests, traffic.received)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_judges_of_other_ranks_say_the_same(ranks: RankPool, world_size: int) -> None:
    alone = NativeServing()
    replies = asker(alone).ask(questions(12), list[str]().append)
    expected = [(one.verdict, one.said, one.error is None) for one in replies]
    cases = {name: case for name, case in CASES.items() if len(case.counts) == world_size}
    by_rank = ranks.run(world_size, ask_each_other, cases)
    assert cases
    for name, case in cases.items():
        found = [one[name] for one in by_rank]
        for one, count in zip(found, case.counts, strict=True):
            assert one.worth == [*expected[:count], *expected[:count][-1:]], name
        asked = sum(found[rank].num_requests for rank in case.judging[:: case.per_engine])
        first = NativeServing()
        asker(first).ask(questions(max(case.counts)), list[str]().append)
        assert asked == first.num_requests, f"{name}: equal questions of different ranks are asked once"
        assert all(one.num_requests == 0 for rank, one in enumerate(found) if rank not in case.judging)


def send_to_one(lengths: list[list[int]]) -> tuple[dict[int, list[int]], int]:
    """What has come, and the bytes of it all; [sender][receiver] is the length of a message, or -1 for none."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    mine = {
        receiver: torch.full((length,), 10 * transport.rank + receiver, dtype=torch.uint8)
        for receiver, length in enumerate(lengths[transport.rank])
        if length >= 0
    }
    with counting_traffic() as traffic:
        arrived = exchange_unannounced(mine, transport.world, "x")
    return {sender: message.tolist() for sender, message in arrived.items()}, traffic.received


def test_messages_go_straight_to_ranks_that_do_not_expect_them(ranks: RankPool) -> None:
    lengths = [[2, 100_000, -1, 0], [-1, -1, -1, -1], [3, -1, -1, -1], [1, -1, -1, 5]]
    by_rank = ranks.run(4, send_to_one, lengths)
    for receiver, (arrived, num_bytes) in enumerate(by_rank):
        sent = {sender: row[receiver] for sender, row in enumerate(lengths) if row[receiver] >= 0}
        assert arrived == {sender: [10 * sender + receiver] * length for sender, length in sent.items()}
        own = sum(length for sender, length in sent.items() if sender != receiver)
        assert own <= num_bytes < own + 400, "beyond the messages there are only their sizes"


class BrokenServing(NativeServing):
    """See `Serving`. Its engine fails."""

    def phase(self):  # type: ignore[no-untyped-def]
        raise RuntimeError("the engine is broken")


def ask_a_broken_judge(_: object) -> str:
    """One of the two ranks that judge fails. As processes of a run, ranks end with their first error."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    serving = BrokenServing() if transport.rank == 1 else NativeServing()
    others = judge_of(Case((1, 2), 1, (12, 0, 0)), transport, serving)
    try:
        others.ask(questions(12 if transport.rank == 0 else 0), list[str]().append)
        transport.world.max(torch.tensor(0), "the end of the evaluation")
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(error)
    return "no error"


def test_a_judge_that_fails_stops_the_others(ranks: RankPool) -> None:
    first, broken, third = ranks.run(3, ask_a_broken_judge, None)
    assert broken == "the engine is broken"
    assert re.match(r"rank 0 waited for answers of a judge with ranks \[1, 2\]; nothing is heard of ranks? 1", first)
    assert third.startswith("rank 2 waited for "), third
