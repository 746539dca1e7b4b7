"""Who computes next, with a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from leaderless.serving.training.turns import Failure, FairQueue, Promise, TrainLane, Work


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Busy:
    """A lane with as many passes of some length as it is given."""

    name: str
    clock: Clock
    length: float
    log: list[str]
    num_left: int = 1_000_000

    def is_ready(self) -> bool:
        return self.num_left > 0

    def advance(self) -> None:
        self.num_left -= 1
        self.clock.now += self.length
        self.log.append(self.name)

    def end(self, failure: Failure) -> None:  # noqa: ARG002
        self.num_left = 0


def test_clients_get_the_same_time_whatever_the_length_of_their_passes() -> None:
    clock, log = Clock(), list[str]()
    queue = FairQueue(clock)
    for name, length in (("a", 1.0), ("b", 4.0), ("c", 0.5)):
        queue.add(name, Busy(name, clock, length, log))
    while clock.now < 1000:
        assert queue.turn()
    used = queue.used_s()
    assert max(used.values()) - min(used.values()) <= 4.0, "the longest pass"
    assert log.count("c") / log.count("b") == pytest.approx(8, rel=0.05)


def test_a_client_with_several_lanes_gets_no_more() -> None:
    clock, log = Clock(), list[str]()
    queue = FairQueue(clock)
    for number in range(9):
        queue.add("many", Busy(f"many{number}", clock, 1.0, log))
    queue.add("one", Busy("one", clock, 1.0, log))
    for _ in range(180):
        queue.turn()
    assert log.count("one") == 90
    assert {log.count(f"many{number}") for number in range(9)} == {10}


def test_nobody_saves_up_time() -> None:
    clock, log = Clock(), list[str]()
    queue = FairQueue(clock)
    queue.add("early", Busy("early", clock, 1.0, log))
    late = Busy("late", clock, 1.0, log, num_left=0)
    queue.add("late", late)
    for _ in range(100):
        queue.turn()
    late.num_left = 100
    log.clear()
    for _ in range(20):
        queue.turn()
    assert log.count("early") == 10


def test_orders_come_between_two_turns_and_nothing_to_do_is_said() -> None:
    queue, log = FairQueue(Clock()), list[str]()
    assert not queue.turn()
    queue.order(lambda: log.append("order"))
    queue.wait(60.0)
    assert not queue.turn()
    assert log == ["order"]


@dataclass
class Told:
    """Promises of a test, and what has been told of them."""

    log: list[str] = field(default_factory=list)

    def promise(self, name: str) -> Promise:
        return Promise(name, "", lambda: self.log.append(name))


def passes(count: int, error: Exception | None = None) -> Work:
    for _ in range(count):
        yield
    if error is not None:
        raise error
    return "done"


def test_requests_for_the_same_adapters_wait_for_those_before_them() -> None:
    told, lane = Told(), TrainLane()
    promises = {seq: told.promise(str(seq)) for seq in (1, 2, 3, 4)}
    for seq in (3, 2):
        lane.push(seq, promises[seq], lambda: passes(2))
        assert not lane.is_ready()
    lane.push(1, promises[1], lambda: passes(1, ValueError("wrong")))
    lane.push(4, promises[4], lambda: passes(1, RuntimeError("bad luck")))
    while lane.is_ready():
        lane.advance()
    assert told.log == ["1", "2", "3", "4"]
    assert promises[1].outcome == Failure("wrong", is_users=True)
    assert promises[2].outcome == promises[3].outcome == "done"
    assert promises[4].outcome == Failure("the server has failed: RuntimeError: bad luck", is_users=False)


def test_the_end_of_a_lane_settles_what_waits_and_what_comes_later() -> None:
    told, lane, gone = Told(), TrainLane(), Failure("gone", is_users=True)
    promises = [told.promise(str(seq)) for seq in range(1, 5)]
    for seq, promise in enumerate(promises[:3], 1):
        lane.push(seq, promise, lambda: passes(5))
    lane.advance()
    lane.end(gone)
    lane.push(4, promises[3], lambda: passes(1))
    assert [one.outcome for one in promises] == [gone] * 4
    assert not lane.is_ready()
