"""A rank that generates continuously, with engine, data and training played: killed, started again and followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leaderless.config.layout import Stragglers
from leaderless.data.batch import Batch
from leaderless.worker.asynchronous.async_state import (
    STATE_FILE,
    GroupDivision,
    RemainingPrompts,
    RolloutQuota,
    all_prompts,
    read_async_state,
)
from leaderless.worker.asynchronous.generation import Generation
from leaderless.worker.asynchronous.in_flight import Advance, Events, Tally
from leaderless.worker.asynchronous.journal import JournalLine

PROMPTS = 3
"""Prompts of an iteration, all of one rank."""
ONE_RANK = SimpleNamespace(ranks=[0], rank=0, size=1, max=lambda values, _: values, gather=lambda one, _: [one])


class Loader:
    """Prompts in the order of their ids."""

    shard, portions = 0, (1,)
    recipe = SimpleNamespace(batch=SimpleNamespace(prompts_per_step=PROMPTS))

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Batch:
        self.position += PROMPTS
        return Batch(torch.arange(self.position - PROMPTS, self.position), {})


@dataclass
class Groups:
    """Groups that take so many steps each; the engine works on some at a time."""

    lengths: Sequence[int]
    slots: int
    events: Events
    left: dict[int, int] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    @property
    def is_busy(self) -> bool:
        return bool(self.left)

    def begin(self, prompts: Batch) -> None:
        groups = prompts.ids.tolist()
        assert self.left.keys().isdisjoint(groups), "a group is begun while it is in flight"
        self.left |= {group: self.lengths[group] for group in groups}

    def step(self) -> list[Advance]:
        self.events.steps += 1
        advances = []
        for group in [*self.left][: self.slots]:
            self.left[group] -= 1
            is_first, is_last = self.left[group] == self.lengths[group] - 1, not self.left[group]
            if is_first or is_last:
                advances.append(Advance(group, is_first, is_last))
            if is_last:
                del self.left[group]
        return advances

    def collect(self) -> list[Advance]:
        return []

    def cancel(self, number: int) -> None:
        del self.left[number]

    def reset(self) -> None:
        self.left.clear()

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Training:
    """Trains an iteration in so many steps of the engine once its share is there."""

    ticks: int
    events: Events
    trained: int = 0
    made: int = 0
    begun_at: int = 0

    def is_there(self) -> bool:
        return self.made > self.trained and self.events.steps - self.begun_at >= self.ticks

    def take(self, generation: Generation) -> None:
        assert self.made > self.trained, "nothing would ever be trained"
        self.trained, self.begun_at = self.trained + 1, self.events.steps
        generation.weights_taken()


@dataclass
class Case:
    """A run.

    Attributes:
        lengths: Steps that each group takes; those of the last iteration may be missing.
        depth: Iterations that the rank may be ahead.
        slack: Age that a group may have beyond that.
        slots: Groups on which the engine works at a time.
        ticks: Steps of the engine that training takes.
    """

    lengths: list[int]
    stragglers: Stragglers
    depth: int
    slack: int
    slots: int
    ticks: int

    @property
    def last(self) -> int:
        return len(self.lengths) // PROMPTS

    def rank(
        self, remaining: RemainingPrompts, made: int, script: Iterator[JournalLine] | None = None
    ) -> tuple[Generation, Training]:
        """A rank that begins after some iterations."""
        events = Events()
        in_flight = Groups(self.lengths, self.slots, events)
        training = Training(self.ticks, events, trained=made, made=made)
        bound = self.depth + self.slack
        quota = RolloutQuota(
            PROMPTS, self.last, depth=self.depth, bound=bound, stragglers=self.stragglers, num_made=made
        )
        beat: Callable[[], None] = lambda: None  # noqa: E731
        parts = cast("Any", (loader := Loader(), loader.next, in_flight, quota, training, remaining, events, beat))
        generation = Generation(*parts)
        generation.script = script
        return generation, training


def hand_over(rank: Generation, training: Training) -> None:
    """Let a rank generate until a share is complete, with weights whenever it wants some."""
    while rank.next() is None:
        training.take(rank)


@settings(
    max_examples=max(40, settings.default.max_examples // 6),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    case=st.builds(
        Case,
        lengths=st.lists(st.sampled_from([1, 2, 3, 5, 40]), min_size=6 * PROMPTS, max_size=12 * PROMPTS),
        stragglers=st.sampled_from(["wait", "defer", "cancel", "cancel"]),
        depth=st.integers(1, 3),
        slack=st.integers(0, 1),
        slots=st.integers(3, 12),
        ticks=st.integers(1, 9),
    ),
    lives=st.lists(st.integers(1, 4), max_size=3),
)
def test_a_rank_that_is_killed_loses_no_group_and_its_journal_can_be_followed(
    tmp_path: Path, case: Case, lives: list[int]
) -> None:
    """After some shares, the rank is killed, and begins anew from a checkpoint of an iteration before."""
    journal: list[JournalLine] = []
    made, remaining = 0, all_prompts(PROMPTS, case.last)
    for start, num_shares in enumerate([*lives, case.last]):
        rank, training = case.rank(remaining, made)
        for _ in range(min(num_shares, case.last - made)):
            hand_over(rank, training)
            journal.append(rank.line)
            training.made += 1
        if training.made == case.last:
            break
        state = rank.snapshot().to_json()
        (tmp_path / STATE_FILE.format("rollout", 0)).write_text(state, encoding="utf-8")
        made, remaining = read_async_state(
            tmp_path,
            "rollout",
            cast("Any", ONE_RANK),
            GroupDivision([1], PROMPTS, case.last),
            start=start + 1,
            logged=training.trained,
        )
        journal = journal[:made]
    assert {len(line["groups"]) for line in journal} == {PROMPTS}
    assert sorted(group for line in journal for group in line["groups"]) == list(range(PROMPTS * case.last))
    rank, training = case.rank(all_prompts(PROMPTS, case.last), 0, iter(journal))
    for line in journal:
        hand_over(rank, training)
        assert rank.line == line
        training.made += 1
