"""Shares of continuous generation: the bound holds for every group, and no group is lost or handed over twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaderless.config.layout import Stragglers
from leaderless.worker.asynchronous.async_state import RolloutQuota


@dataclass
class Simulated:
    """A rank that works on groups with lengths of its own, and a trainer; time goes in ticks.

    Attributes:
        shares: Groups of each iteration.
        ages: Largest age of a group in iterations, when it was trained.
        canceled: Groups that were given up, and begun again; some perhaps more than once.
        ticks: Ticks that the run took.
    """

    shares: list[list[int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    canceled: list[int] = field(default_factory=list)
    ticks: int = 0


def simulate(
    lengths: list[int], size: int, depth: int, bound: int, stragglers: Stragglers, train_ticks: int, slots: int
) -> Simulated:
    """Hand over all shares of a run; lengths are the ticks that each group takes."""
    last = len(lengths) // size
    shares, seen = RolloutQuota(size, last, depth=depth, bound=bound, stragglers=stragglers), Simulated()
    left, oldest, trained, free_at = dict[int, int](), dict[int, int](), 0, 0
    unbegun, waiting = [*range(size * last)], list[tuple[int, list[int]]]()
    while len(seen.shares) < last:
        assert seen.ticks < 10_000, "nothing happens any more"
        while (share := shares.take(trained)) is not None:
            iteration = len(seen.shares) + 1
            seen.shares.append(share)
            seen.ages.append(max(iteration - 1 - oldest[group] for group in share))
            waiting.append((iteration, share))
            if iteration == last:
                return seen
        for group in shares.overdue(trained):
            seen.canceled.append(group)
            del left[group], oldest[group]
            unbegun.append(group)
        room = shares.room(trained)
        begun, unbegun = unbegun[:room], unbegun[room:]
        assert len(begun) == room, "there are as many as may be begun"
        shares.begin(begun)
        left |= {group: lengths[group] for group in begun}
        for group in sorted(left)[:slots]:
            if group not in oldest:
                oldest[group] = trained
                shares.sampled(group, trained)
            left[group] -= 1
            if not left[group]:
                del left[group]
                shares.finish(group)
        seen.ticks += 1
        if waiting and waiting[0][0] == trained + 1 and seen.ticks >= free_at + train_ticks:
            waiting.pop(0)
            trained, free_at = trained + 1, seen.ticks
    return seen


@given(
    lengths=st.lists(st.integers(1, 40), min_size=12, max_size=60),
    size=st.integers(1, 4),
    depth=st.integers(1, 3),
    slack=st.integers(0, 3),
    stragglers=st.sampled_from(["wait", "defer", "cancel"]),
    train_ticks=st.integers(1, 30),
    slots=st.integers(1, 12),
)
def test_no_group_is_too_old_or_lost(
    lengths: list[int], size: int, depth: int, slack: int, stragglers: Stragglers, train_ticks: int, slots: int
) -> None:
    last = len(lengths) // size
    seen = simulate(lengths, size, depth, depth + slack, stragglers, train_ticks, slots)
    handed = [group for share in seen.shares for group in share]
    assert sorted(handed) == list(range(size * last))
    assert {len(share) for share in seen.shares} == {size}
    assert max(seen.ages) <= depth + slack
    if stragglers == "wait":
        assert handed == list(range(size * last))
    if stragglers != "cancel":
        assert not seen.canceled


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_waiting_keeps_the_order_and_deferring_does_not_wait(depth: int) -> None:
    random = Random(3)
    lengths = [max(1, int(random.lognormvariate(2, 1.1))) for _ in range(400)]
    plain, deferring, canceling = (
        simulate(lengths, 8, depth, depth + 3, stragglers, 20, 64) for stragglers in ("wait", "defer", "cancel")
    )
    assert deferring.ticks <= plain.ticks
    assert deferring.shares != plain.shares
    again = max(lengths[group] for group in canceling.canceled)
    assert canceling.ticks <= 1.02 * deferring.ticks + again, "what is given up is done again, at the end"


def test_groups_wait_for_their_share_while_training_has_enough() -> None:
    shares = RolloutQuota(2, 10, depth=2, bound=4, stragglers="defer")
    shares.begin(range(6))
    for group in range(6):
        shares.sampled(group, 0)
    for group in (1, 2, 3):
        shares.finish(group)
    assert shares.take(trained=0) == [1, 2], "training waits, so that group 0 is left for later"
    assert shares.take(trained=0) is None, "training has the rows of an iteration, so that group 0 may still come"
    shares.finish(0)
    assert shares.take(trained=0) == [0, 3]


def test_a_late_group_holds_up_training_or_is_given_up() -> None:
    for stragglers, given_up in (("defer", []), ("cancel", [0])):
        shares = RolloutQuota(1, 10, depth=1, bound=1, stragglers=stragglers)  # type: ignore[arg-type]
        shares.begin([0])
        shares.sampled(0, 0)
        shares.begin([1])
        shares.sampled(1, 0)
        shares.finish(1)
        assert shares.take(0) == [1]
        shares.begin([2])
        shares.sampled(2, 1)
        shares.finish(2)
        assert shares.take(1) is None, "group 0 would be too old in the iteration after this one"
        assert shares.overdue(1) == given_up
        assert shares.take(1) == ([2] if given_up else None)
