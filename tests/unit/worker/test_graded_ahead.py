"""Grading next to generation: each response is graded once, whenever it is asked about."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from leaderless.data.batch import Batch
from leaderless.observability.clock import Clock
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.rollout.engine import Completion
from leaderless.stages.context import Grader
from leaderless.worker.asynchronous.async_grading import BackgroundGrader


def asked_of(prompt: Batch, responses: Sequence[Completion]) -> list[tuple[RewardInput, str | None]]:
    group = int(prompt.ids)
    return [(RewardInput(group, str(one.tokens[0]), None, {}, is_truncated=False), None) for one in responses]


def prompt(group: int) -> Batch:
    return Batch(torch.tensor([group]), {})


def responses(*tokens: int) -> list[Completion]:
    return [Completion([token]) for token in tokens]


@contextmanager
def grading(grade: Grader) -> Iterator[BackgroundGrader]:
    ahead = BackgroundGrader(grade, asked_of, Clock())
    try:
        yield ahead
    finally:
        ahead.close()


def graded_in(ahead: BackgroundGrader, wanted: int, beat: Callable[[], None] = lambda: None) -> set[int]:
    found: set[int] = set()
    while len(found) < wanted:
        found |= {*ahead.finished()}
        ahead.wait()
        beat()
    return found


def test_a_share_has_the_grades_of_its_groups_and_nothing_is_graded_twice() -> None:
    calls: list[tuple[int, str]] = []
    may_grade = threading.Event()

    def grade(samples: Sequence[RewardInput], sources: Sequence[str | None]) -> list[Graded]:
        assert may_grade.wait(10)
        assert len(samples) == len(sources)
        calls.extend((int(str(one.prompt)), one.response) for one in samples)
        return [Graded(100.0 * int(str(one.prompt)) + float(one.response), True, {}) for one in samples]

    with grading(grade) as ahead:
        for group in (1, 2, 3, 4):
            ahead.begin(prompt(group), responses(5, 5, 6))
        assert ahead.is_busy
        assert not ahead.finished(), "the rank goes on meanwhile"
        ahead.forget(4)
        may_grade.set()
        assert graded_in(ahead, 3) == {1, 2, 3}
        assert not ahead.is_busy
        ahead.hand_over([1, 3])
        share = [asked for group in (3, 1) for asked in asked_of(prompt(group), responses(5, 5, 6, 7))]
        found = ahead.grade([sample for sample, _ in share], [source for _, source in share])
        assert [one.value for one in found] == [305.0, 305.0, 306.0, 307.0, 105.0, 105.0, 106.0, 107.0]
    assert [calls.count((group, "5")) for group in (1, 2, 3)] == [2, 2, 2]
    assert calls[-2:] == [(3, "7"), (1, "7")], "only what nobody has asked about before is graded with the share"


def test_an_error_of_grading_is_raised_where_the_rank_generates() -> None:
    def grade(samples: Sequence[RewardInput], sources: Sequence[str | None]) -> list[Graded]:
        raise RuntimeError(f"cannot grade {len(samples)} of {len(sources)}")

    with grading(grade) as ahead:
        ahead.begin(prompt(1), responses(5, 6))
        with pytest.raises(RuntimeError, match="cannot grade 2 of 2"):
            ahead.await_group(1, lambda: None)
        assert not ahead.await_group(2, lambda: None), "nobody has begun it"
