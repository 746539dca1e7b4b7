"""The clock of a rank: every second belongs to one state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from leaderless.observability.clock import STATES, Clock


def ticking(seconds: float = 1.0) -> Clock:
    """A clock on which time passes by as much whenever somebody looks."""
    times: Iterator[float] = count(0.0, seconds)
    return Clock(lambda: next(times))


def nonzero(clock: Clock) -> dict[str, float]:
    return {state: seconds for state, seconds in clock.take().items() if seconds}


def test_time_belongs_to_the_innermost_state_and_adds_up() -> None:
    clock = ticking()
    with clock.doing("generate"):
        with clock.doing("environment"):
            pass
        with clock.doing("environment"):
            pass
    # Looks at 0 (start), 1, 2, 3, 4, 5, 6 and 7: seven seconds.
    assert nonzero(clock) == {"other": 2, "generate": 3, "environment": 2}


def test_what_is_taken_is_not_taken_again_and_a_state_goes_on() -> None:
    clock = ticking()
    with clock.doing("train"):
        assert nonzero(clock) == {"other": 1, "train": 1}
        assert nonzero(clock) == {"train": 1}
    assert nonzero(clock) == {"train": 1, "other": 1}
    assert set(clock.take()) == set(STATES)


def test_a_state_ends_with_an_error() -> None:
    clock = ticking()
    with pytest.raises(ValueError, match="x"), clock.doing("score"):
        raise ValueError("x")
    assert nonzero(clock) == {"other": 2, "score": 1}


def test_other_threads_change_nothing() -> None:
    clock = ticking()

    def score() -> None:
        with clock.doing("score"):
            pass

    with clock.doing("train"):
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
    assert nonzero(clock) == {"other": 2, "train": 1}


def test_a_clock_begins_anew_with_the_thread_that_starts_it() -> None:
    clock = ticking()
    taken: list[dict[str, float]] = []

    def run() -> None:
        clock.start()
        with clock.doing("data"):
            pass
        taken.append(nonzero(clock))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert taken == [{"other": 2, "data": 1}]
