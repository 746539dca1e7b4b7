"""Waits for messages on an accelerator that never come: the host notices, and says what it has waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from leaderless.distributed import in_flight, transport
from leaderless.distributed.errors import CollectiveError
from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool, WeightBlock, even_rows, everything
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import receive_weights
from leaderless.planner import Layout


class Work:
    """A message on an accelerator, or a mark behind it: `wait` only queues."""

    def __init__(self, *, is_there: bool = False) -> None:
        self.is_there = is_there

    def is_completed(self) -> bool:
        return self.is_there

    query = is_completed

    def wait(self) -> None:
        pass


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    """Two ranks whose messages never come; their device has no values."""
    for name in ("all_reduce", "all_gather", "all_to_all_single", "broadcast"):
        monkeypatch.setattr(dist, name, Mock(return_value=Work()))
    monkeypatch.setattr(dist, "P2POp", Mock())
    monkeypatch.setattr(dist, "batch_isend_irecv", Mock(return_value=[Work()]))
    monkeypatch.setattr(transport, "_all_gather", Mock(return_value=Work()))
    monkeypatch.setattr(transport, "silent_ranks", Mock(return_value=(1,)))
    marks = Mock(side_effect=lambda _: Work())
    monkeypatch.setattr(in_flight, "mark", marks)
    return ProcessGroup((0, 1), 0, payload_device=torch.device("meta"), timeout_s=0.02)


VALUES = torch.zeros(2, 3, device="meta")
AT_ONCE: dict[str, Callable[[ProcessGroup], object]] = {
    "sum": lambda group: group.sum(VALUES, "rows"),
    "max": lambda group: group.max(VALUES, "rows"),
    "broadcast": lambda group: group.broadcast(VALUES, 1, "rows"),
    "swap_numbers": lambda group: group.swap_numbers(VALUES, "rows"),
}
LATER: dict[str, Callable[[ProcessGroup], object]] = {
    "sum": lambda group: group.sum(VALUES, "rows", most_ahead=MESSAGES_AHEAD),
    "max": lambda group: group.max(VALUES, "rows", most_ahead=MESSAGES_AHEAD),
    "swap": lambda group: group.swap(VALUES, "rows"),
    "swap_uneven": lambda group: group.swap_uneven(VALUES, [1, 1], [1, 1], "rows"),
    "gather_even": lambda group: group.gather_even(VALUES, "rows"),
    "pass_on": lambda group: group.pass_on(VALUES, "rows").wait(),
    "gather_equal": lambda group: group.gather_equal(VALUES.flatten(), "rows").wait(),
    "exchange_rounds": lambda group: group.exchange_rounds([([(1, VALUES)], [])], "rows"),
    "receive": lambda group: group.receive(VALUES, 1, "rows"),
    "send": lambda group: group.send(VALUES, 1, "rows").wait(),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_message_that_never_comes_is_named(group: ProcessGroup, name: str) -> None:
    message = r"rank 0 waited for rows with ranks \[1\]; nothing is heard of rank 1: nothing has come for 0.018 s"
    with pytest.raises(CollectiveError, match=message):
        AT_ONCE[name](group)


@pytest.mark.parametrize("name", LATER)
def test_the_host_waits_for_none_of_the_newest_messages_of_a_pass(group: ProcessGroup, name: str) -> None:
    other = replace(group, ranks=(0, 2))
    group.swap(VALUES, "words")
    for _ in range(MESSAGES_AHEAD - 1):
        LATER[name](other)
    assert len(group.backlog) == MESSAGES_AHEAD
    with pytest.raises(CollectiveError, match=r"waited for words with ranks \[1\]; nothing"):
        LATER[name](other)


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_is_missing_is_the_oldest_message(group: ProcessGroup, name: str) -> None:
    group.swap(VALUES, "words")
    group.swap(VALUES, "others")
    with pytest.raises(CollectiveError, match="waited for words"):
        AT_ONCE[name](group)


def test_messages_that_have_come_are_forgotten(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "mark", lambda _: Work(is_there=True))
    for _ in range(3 * MESSAGES_AHEAD):
        group.swap(VALUES, "words")
    assert len(group.backlog) == MESSAGES_AHEAD
    group.sum(VALUES, "rows")
    assert not group.backlog


def test_the_time_of_a_message_begins_when_it_is_queued(group: ProcessGroup) -> None:
    group.timeout_s = 1.0
    group.swap(VALUES, "words")
    group.backlog[0].queued_s -= 0.88
    begin = time.monotonic()
    with pytest.raises(CollectiveError, match="waited for words"):
        group.sum(VALUES, "rows")
    assert time.monotonic() - begin < 0.5


def test_nothing_is_marked_where_the_host_has_waited(group: ProcessGroup) -> None:
    values = torch.zeros(2, 3)
    group.sum(values, "rows")
    group.swap(values, "rows")
    group.receive(values, 1, "rows")
    assert not group.backlog


def test_a_weight_is_given_to_its_user_once_its_messages_have_come(group: ProcessGroup) -> None:
    """The user may wait for the device, and could not name a rank that is missing."""
    layout = Layout((0, 1), dp=2)
    pools = Pool(layout, even_rows), Pool(layout, everything)
    route = WeightRoute("weights", {"kernel": (4, 2)}, *pools, torch.float32, 0, is_gathered=True)
    kernel = LocalWeight("kernel", (4, 2), WeightBlock((0, 0), (2, 2)), torch.zeros(2, 2, device="meta"))
    stream = receive_weights(route, group, group, HeldWeights.of([kernel], 3))
    with pytest.raises(CollectiveError, match="waited for weights"):
        next(stream)
