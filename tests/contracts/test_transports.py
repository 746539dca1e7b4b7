"""What every library that moves rows and weights between ranks must do: torch, NIXL, and the stand-in for NIXL."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankError, RankPool
from tests.distributed.test_transport import talk
from tests.transports import HAS_NIXL, moved_by

from leaderless.distributed.errors import CollectiveError
from leaderless.distributed.one_sided.endpoint import PART_BYTES, PARTS, WHOLE_BYTES
from leaderless.distributed.transport import Round, Transport

LIBRARIES = [
    "torch",
    "stand-in",
    pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the package nixl is not installed")),
]
each_library = pytest.mark.parametrize("library", LIBRARIES)
SIZES = (0, 1, WHOLE_BYTES, WHOLE_BYTES + 1, PART_BYTES, 2 * PART_BYTES + 3)
TIMEOUT_S = 4.0


def make(timeout_s: float = 60.0) -> Transport:
    """The process groups of a test, of all ranks."""
    return Transport(torch.device("cpu"), timeout_s)


def content(sender: int, receiver: int, size: int) -> torch.Tensor:
    """The bytes of a message, others for each pair and at each place."""
    return (torch.arange(size) * 7 + 31 * sender + 5 * receiver + size).to(torch.uint8)


def talk_by(library: str) -> None:
    with moved_by(library):
        talk()


@each_library
def test_ranks_understand_each_other(ranks: RankPool, library: str) -> None:
    ranks.run(3, talk_by, library)


def rounds_of(rank: int, size: int, received: list[torch.Tensor]) -> Iterator[Round]:
    """Messages to the next rank and from the previous one; of each length, and one rank may have none."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in SIZES:
        received.append(torch.zeros(length, dtype=torch.uint8))
        yield [(after, content(rank, after, length))], [(before, received[-1])]
    received.append(torch.zeros(PART_BYTES, dtype=torch.uint8))
    yield (
        [(1, content(0, 1, PART_BYTES))] if rank == 0 else [],
        [(0, received[-1])] if rank == 1 else [],
    )


def go_round(library: str) -> dict[str, object]:
    """Rounds in the world, and at the same time in a lane of other ranks; what the endpoint has then."""
    with moved_by(library) as made:
        transport = make()
        rank, size = transport.rank, transport.world.size
        transport.add_lane("aside", (0, 1))
        aside = list[torch.Tensor]()
        thread = threading.Thread(target=lambda: run_aside(transport, aside))
        if rank < 2:
            thread.start()
        received = list[torch.Tensor]()
        transport.world.exchange_rounds(rounds_of(rank, size, received), "rows")
        before = (rank - 1) % size
        for message, length in zip(received, SIZES, strict=False):
            assert torch.equal(message, content(before, rank, length))
        if rank == 1:
            assert torch.equal(received[-1], content(0, 1, PART_BYTES))
        if rank < 2:
            thread.join()
            other = 1 - rank
            assert [len(message) for message in aside] == [PART_BYTES * 2] * 3
            assert all(torch.equal(message, content(other, rank, 2 * PART_BYTES)) for message in aside)
        first = [endpoint.registered_bytes for endpoint in made]
        for _ in range(3):
            transport.world.exchange_rounds(rounds_of(rank, size, []), "rows")
        assert [endpoint.registered_bytes for endpoint in made] == first, "registered memory is used again"
        transport.world.sum(torch.zeros(1), "the end")
        transport.close()
        assert all(endpoint.registered_bytes == 0 for endpoint in made)
        return {"registered": first, "peers": [endpoint.peers for endpoint in made]}


def run_aside(transport: Transport, received: list[torch.Tensor]) -> None:
    """Messages of a background thread, in a process group that it has to itself."""
    lane, other = transport.lane("aside", (0, 1)), 1 - transport.rank
    for _ in range(3):
        received.append(torch.zeros(2 * PART_BYTES, dtype=torch.uint8))
        sent = [(other, content(transport.rank, other, 2 * PART_BYTES))]
        lane.exchange_rounds([(sent, [(other, received[-1])])], "windows")


@each_library
def test_bytes_arrive_in_order_on_two_threads_and_memory_is_used_again(ranks: RankPool, library: str) -> None:
    found = ranks.run(4, go_round, library)
    if library == "torch":
        return
    slab = PARTS * PART_BYTES
    # One for what arrives, one for what the main thread sends, and one for what a lane sends.
    assert [one["registered"] for one in found] == [[3 * slab]] * 2 + [[2 * slab]] * 2
    # Each rank has met its neighbors, and not the rank across.
    assert [one["peers"] for one in found] == [[(1, 3)], [(0, 2)], [(1, 3)], [(0, 2)]]


def wait_for_nobody(library: str, way: str) -> tuple[str, float, int]:
    """The error of rank 0, whose peer does not do its part; how long it took; and what stays registered."""
    with moved_by(library) as made:
        world = make(TIMEOUT_S).world
        rows = torch.zeros(PART_BYTES, dtype=torch.uint8)
        if world.rank == 1:
            world.exchange_rounds([([(0, rows)], [])] if way == "receive" else [([], [(0, rows)])], "rows")
            time.sleep(TIMEOUT_S + 1)
            return "", 0.0, 0
        messages = [([], [(1, rows)])] if way == "receive" else [([(1, rows)], [])]
        world.exchange_rounds(messages, "rows")
        begin = time.monotonic()
        try:
            world.exchange_rounds(messages, "more rows")
        except CollectiveError as error:
            return str(error), time.monotonic() - begin, sum(endpoint.registered_bytes for endpoint in made)
        return "", 0.0, -1


@pytest.mark.parametrize("way", ["receive", "send"])
@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_rank_that_does_not_answer_is_named_within_the_deadline(ranks: RankPool, library: str, way: str) -> None:
    (message, seconds, registered), _ = ranks.run(2, wait_for_nobody, library, way, timeout_s=4 * TIMEOUT_S)
    assert message.startswith(
        "rank 0 waited for more rows with ranks [1]; nothing is heard of rank 1: nothing has come"
    )
    assert 0.9 * TIMEOUT_S <= seconds < 0.9 * TIMEOUT_S + 4
    assert registered == 0


def outlive(library: str) -> tuple[str, float, int]:
    """The error of rank 0, whose peer fails; how long it took; and what stays registered."""
    with moved_by(library) as made:
        transport = make(20.0)
        world, rows = transport.world, torch.zeros(PART_BYTES, dtype=torch.uint8)
        look, begin = made[0]._continue_reads, time.monotonic()
        if world.rank == 0:  # finds that its rows have come when its peer has stopped already
            made[0]._continue_reads = lambda agent: look(agent) if time.monotonic() > begin + 1 else None
        world.exchange_rounds([([(1 - world.rank, rows)], [(1 - world.rank, rows.clone())])], "rows")
        if world.rank == 1:
            transport.close("RuntimeError: a disk is full")
            return "", 0.0, 0
        begin = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            world.exchange_rounds([([], [(1, rows)])], "more rows")
        return str(caught.value), time.monotonic() - begin, sum(endpoint.registered_bytes for endpoint in made)


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_rank_that_fails_ends_the_wait_of_others_with_its_reason(ranks: RankPool, library: str) -> None:
    (message, seconds, registered), _ = ranks.run(2, outlive, library)
    assert "rank 0 waited for more rows with ranks [1]" in message
    assert "rank 1 has stopped: rank 1 has failed: RuntimeError: a disk is full" in message
    assert seconds < 10
    assert registered == 0


def lose(library: str, path: str) -> None:
    """Rank 0 writes the error of its wait for rank 1, whose process is killed."""
    with moved_by(library):
        world = make(30.0).world
        rows = torch.zeros(PART_BYTES, dtype=torch.uint8)
        world.exchange_rounds([([(1 - world.rank, rows)], [(1 - world.rank, rows.clone())])], "rows")
        if world.rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            world.exchange_rounds([([], [(1, rows)])], "more rows")
        Path(path).write_text(f"{time.monotonic() - begin:.1f} {caught.value}", encoding="utf-8")


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_rank_whose_process_has_died_is_named_within_the_deadline(
    ranks: RankPool, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.txt"
    monkeypatch.setattr("tests.distributed.ranks.GRACE_S", 60.0)  # for rank 0 to notice
    with pytest.raises(RankError, match="the process ended with exit code -9"):
        ranks.run(2, lose, library, str(path))
    seconds, _, message = path.read_text(encoding="utf-8").partition(" ")
    assert message.startswith("rank 0 waited for more rows with ranks [1]")
    assert "rank 1 cannot be reached any more" in message
    assert float(seconds) < 0.9 * 30


def broken_rounds(rows: torch.Tensor) -> Iterator[Round]:
    """A round, and an error while the next one is prepared."""
    yield [(1, rows)], []
    raise ValueError("a row is too long")


def give_up(library: str) -> tuple[str, int, str]:
    """Rank 0 fails while it prepares a round; what each rank raises, what is registered, and what comes next."""
    with moved_by(library) as made:
        world = make(30.0).world
        rows = content(0, 1, 2 * PART_BYTES)
        try:
            if world.rank == 0:
                world.exchange_rounds(broken_rounds(rows), "rows")
            else:
                time.sleep(1)
                received = torch.zeros_like(rows)
                world.exchange_rounds([([], [(0, received)]), ([], [(0, received)])], "rows")
        except (ValueError, CollectiveError) as error:
            with pytest.raises(CollectiveError) as caught:
                world.exchange_rounds([([], [(1 - world.rank, rows)])], "later rows")
            return str(error), sum(endpoint.registered_bytes for endpoint in made), str(caught.value)
        return "", -1, ""


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_what_is_given_up_leaves_nothing_registered_on_both_sides(ranks: RankPool, library: str) -> None:
    first, second = ranks.run(2, give_up, library)
    assert first[:2] == ("a row is too long", 0)
    assert "nothing more is sent by NIXL: rank 0 has stopped in the middle of rows" in first[2]
    assert second[0].startswith("rank 1 waited for rows with ranks [0]")
    assert "rank 0 has stopped: rank 0 has stopped in the middle of rows" in second[0]
    assert second[1] == 0


def connect_late(library: str) -> bool:
    """Whether all arrives where a rank connects later than its peer, which may send at once."""
    with moved_by(library) as made:
        world = make(20.0).world
        connect = made[0].connect

        def late(*args: Any) -> None:
            if world.rank == 0:
                time.sleep(1)
            connect(*args)

        made[0].connect = late
        sent, received = content(world.rank, 1 - world.rank, PART_BYTES), torch.zeros(PART_BYTES, dtype=torch.uint8)
        world.exchange_rounds([([(1 - world.rank, sent)], [(1 - world.rank, received)])], "rows")
        return torch.equal(received, content(1 - world.rank, world.rank, PART_BYTES))


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_rank_may_connect_later_than_its_peer(ranks: RankPool, library: str) -> None:
    assert ranks.run(2, connect_late, library) == [True, True]


def fail_to_connect(library: str) -> tuple[str, float]:
    """The error of each rank, where rank 0 gets metadata that it cannot use; and how long it took."""
    with moved_by(library) as made:
        world, rows = make(20.0).world, torch.zeros(8, dtype=torch.uint8)
        connect = made[0].connect
        if world.rank == 0:
            made[0].connect = lambda tag, peer, metadata: connect(tag, peer, torch.zeros_like(metadata))
        begin = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            world.exchange_rounds([([(1 - world.rank, rows)], [])] if world.rank else [([], [(1, rows)])], "rows")
        return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_rank_that_cannot_connect_gives_its_peer_the_reason(ranks: RankPool, library: str) -> None:
    (first, _), (second, seconds) = ranks.run(2, fail_to_connect, library)
    assert first.startswith("rank 0 waited for rows with ranks [1]")
    assert "rank 1 cannot be reached by NIXL: " in first
    assert second.startswith("rank 1 waited for rows with ranks [0]")
    assert "rank 0 cannot connect: rank 1 cannot be reached by NIXL: " in second
    assert seconds < 10


def mix_lengths(library: str) -> str:
    """The error of a rank that expects another number of bytes."""
    with moved_by(library):
        world = make(20.0).world
        if world.rank == 0:
            with pytest.raises(CollectiveError):
                world.exchange_rounds([([(1, torch.zeros(8, dtype=torch.uint8))], [])], "rows")
            return ""
        with pytest.raises(CollectiveError) as caught:
            world.exchange_rounds([([], [(0, torch.zeros(9, dtype=torch.uint8))])], "rows")
        return str(caught.value)


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_message_of_another_length_is_refused(ranks: RankPool, library: str) -> None:
    first, second = ranks.run(2, mix_lengths, library)
    assert first == ""
    assert "rank 0 sends 8 bytes, but 9 are expected" in second


def versions(library: str) -> str:
    """The error of ranks with different versions of the package."""
    with moved_by(library):
        from leaderless.distributed.one_sided import library as package

        found, package.check_nixl = package.check_nixl(), lambda: f"1.{dist.get_rank()}.0"
        try:
            make(20.0)
        except RuntimeError as error:
            return str(error)
        finally:
            package.check_nixl = lambda: found
        return ""


def test_other_versions_are_named_before_anything_is_sent(ranks: RankPool) -> None:
    first, second = ranks.run(2, versions, "stand-in")
    assert first == (
        "rank 0: ranks 1 have another version of NIXL than rank 0 (here 1.0.0): install the same one on all machines, "
        "or set run.transport=torch"
    )
    assert "(here 1.1.0)" in second
