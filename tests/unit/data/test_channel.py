"""The ends of a channel, on threads that play its ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from leaderless.data.buffer.databuffer import Databuffer
from leaderless.distributed.activity import Activity
from leaderless.distributed.background import Background
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.clock import Tracer
from leaderless.planner import Channel, Layout, SyncWeights
from leaderless.worker.asynchronous.channels import Channels, Inbox, Note, Outbox
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.chain import Chain


@dataclass
class Meeting:
    """The numbers of all ranks of a process group that is played by threads."""

    size: int
    barrier: threading.Barrier = field(init=False)
    given: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=10)


class Played(ProcessGroup):
    """One rank of such a process group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(tuple(range(meeting.size)), rank)
        self.meeting = meeting

    def max(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
        self.meeting.given[self.rank] = values
        self.meeting.barrier.wait()
        largest = torch.stack(list(self.meeting.given.values())).amax(0)
        self.meeting.barrier.wait()
        return largest


def exchanged(*notes: Note) -> list[Note]:
    meeting = Meeting(len(notes))
    with ThreadPoolExecutor(len(notes)) as pool:
        ranks = range(len(notes))
        return list(pool.map(lambda rank: notes[rank].exchange(Played(meeting, rank), "a->b"), ranks))


def outbox(capacity: int = 1, timeout_s: float = 10.0) -> Outbox:
    return Outbox("a->b", capacity, timeout_s, Activity())


def test_what_one_rank_notes_holds_for_all() -> None:
    notes = exchanged(Note(7), Note(7, is_asked_to_stop=True), Note(7, is_checkpoint_due=True))
    assert notes == [Note(7, is_asked_to_stop=True, is_checkpoint_due=True)] * 3
    assert exchanged(Note(7), Note(7, is_stopping=True)) == [Note(7, is_stopping=True)] * 2


def test_ranks_at_different_iterations_never_exchange_rows() -> None:
    with pytest.raises(RuntimeError, match="channel a->b is at iteration 2 on some rank, and at 3 on another"):
        exchanged(Note(3), Note(2), Note(3))


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_as_many_iterations_are_in_flight_as_the_capacity_says(capacity: int) -> None:
    box, taken, sent = outbox(capacity), threading.Semaphore(0), list[int]()

    def send(iteration: int) -> Callable[[], None]:
        def task() -> None:
            taken.acquire()
            sent.append(iteration)

        return task

    for iteration in range(capacity):
        box.make_room()
        box.post(iteration, send(iteration))
    waiting = threading.Thread(target=box.make_room)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert sent == []
    taken.release()
    waiting.join(10)
    assert not waiting.is_alive()
    assert sent == [0]
    for _ in range(capacity):
        taken.release()
    box.post(capacity, send(capacity))
    box.finish()
    assert sent == list(range(capacity + 1))


def test_what_is_sent_is_gone_when_there_is_room_again() -> None:
    weights, taken, left, lane = torch.zeros(8), threading.Event(), list[Tensor | None](), Background("lane")
    copy = weakref.ref(weights)
    sent = lane.run(partial(lambda _, taken: taken.wait(10), weights, taken))
    sent.add_done_callback(lambda _: left.append(copy()))  # in the thread, before anyone else learns of it
    del weights
    assert copy() is not None, "it waits to be sent"
    taken.set()
    lane.close()
    assert left == [None], "the plan of a rank that trains does not count it"


def test_an_iteration_begins_when_there_is_room_for_what_it_sends() -> None:
    chain, order = object.__new__(Chain), list[str]()
    made = {
        "_parts": SimpleNamespace(plan=SimpleNamespace(channels=["weights"])),
        "_entries": (),
        "_arrivals": (),
        "_walk": lambda _: order.append("entries"),
        "events": [],
        "proof": None,
        "generation": None,
        "buffer": SimpleNamespace(clear=lambda: None),
        "channels": SimpleNamespace(make_room=lambda: order.append("room")),
    }
    vars(chain).update(made)
    chain.walk()
    assert order == ["room", "entries"]


def test_posts_of_one_iteration_take_the_room_of_one() -> None:
    box, taken, sent = outbox(2), threading.Semaphore(0), list[str]()
    for iteration in (1, 2):
        for part in "ab":
            box.post(iteration, lambda name=f"{iteration}{part}": [taken.acquire(), sent.append(name)][1])
    waiting = threading.Thread(target=box.make_room)
    waiting.start()
    taken.release()
    waiting.join(0.1)
    assert waiting.is_alive(), "a part of the first iteration is still in flight"
    taken.release()
    waiting.join(10)
    assert not waiting.is_alive()
    assert sent == ["1a", "1b"]
    taken.release(2)
    box.finish()
    assert sent == ["1a", "1b", "2a", "2b"]


def test_an_iteration_is_received_once_and_before_the_next() -> None:
    received, may_come = list[int](), threading.Event()

    def fetch(iteration: int) -> int:
        may_come.wait(10)
        received.append(iteration)
        return 10 * iteration

    box = Inbox("the weights", fetch, 10.0, Activity())
    box.begin(3)
    box.begin(3)
    assert not box.is_there()
    with pytest.raises(AssertionError, match="iteration 3 of the weights is not taken"):
        box.begin(4)
    may_come.set()
    assert box.take() == 30
    box.begin(4)
    assert box.take() == 40
    assert received == [3, 4]
    box.close()


def test_a_wait_for_the_other_end_names_the_iteration_and_ends() -> None:
    box, taken = outbox(timeout_s=0.1), threading.Event()
    box.post(4, lambda: [taken.wait(10), None][1])
    message = "iteration 4 of channel a->b has not been taken for 0.1 s: see what the loop at its other end waits for"
    with pytest.raises(RuntimeError, match=message):
        box.make_room()
    taken.set()


def test_while_a_rank_waits_others_see_what_for() -> None:
    activity, taken = Activity(), threading.Event()
    box = Outbox("a->b", 1, 10.0, activity)
    box.post(4, lambda: [taken.wait(10), None][1])
    waiting = threading.Thread(target=box.make_room)
    waiting.start()
    waiting.join(0.1)
    assert activity.waiting_for == "iteration 4 of channel a->b to be taken"
    taken.set()
    waiting.join(10)
    assert activity.waiting_for == ""


def post_twice(box: Outbox) -> None:
    for iteration in (2, 3):
        box.post(iteration, lambda: None)
    box.finish()


@pytest.mark.parametrize("then", [post_twice, Outbox.make_room, Outbox.finish])
def test_a_failure_of_the_lane_is_raised_in_the_main_thread(then: Callable[[Outbox], None]) -> None:
    box, has_failed = outbox(), threading.Event()

    def fail() -> None:
        has_failed.set()
        raise RuntimeError("rank 3 is gone")

    box.post(1, fail)
    has_failed.wait(10)
    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        then(box)


def test_no_weights_wait_for_the_end_of_the_iteration_that_has_left_them() -> None:
    """What is noted comes at that end: with the weights of one role before it, those of another one would wait."""
    log = list[str]()

    def note(numbers: Tensor, what: str) -> Tensor:
        log.append(what)
        return numbers

    syncs = [SyncWeights(role, Layout((1,), 1), Layout((0,), 1)) for role in "xy"]
    weights = [Channel(f"{sync.role}=>rollout", "weights", "train", "rollout", 1, 1, sync=sync) for sync in syncs]
    transport = SimpleNamespace(rank=0, activity=Activity(), lane=lambda *_: SimpleNamespace(max=note))
    roles = SimpleNamespace(fetch=lambda sync, _: log.append(sync.role))
    plan = SimpleNamespace(channels=weights, continuous_loops=[])
    recipe = SimpleNamespace(run=SimpleNamespace(timeout_s=10.0))
    parts = SimpleNamespace(plan=plan, transport=transport, roles=roles, recipe=recipe)
    channels = Channels(cast("Parts", parts), Progress({}), cast("Databuffer", None), Tracer(None, 0))
    channels.weights.begin(1)
    channels.weights.take()
    assert log == ["x", "y", "channel x=>rollout", "channel y=>rollout"]
    channels.close()
