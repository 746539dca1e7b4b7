"""How the responses of requests become groups."""

from __future__ import annotations

import random

import pytest

from leaderless.serving.online.feedback_ledger import grouped


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([1, 1, 1], []),
        ([1] * 9, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([4, 1, 4, 1, 2], [[0], [2], [1, 3, 4]]),
        ([3, 3], [[0]]),  # the second does not fit into the first, which is more than half full
        ([1, 4, 4], [[1], [2]]),  # the first is not half full, and waits for others
        ([3, 2, 1], [[0]]),  # nothing is added to it then
    ],
)
def test_requests_stay_whole_and_in_order(sizes: list[int], groups: list[list[int]]) -> None:
    assert sorted(grouped(sizes, 4)) == sorted(groups)


def test_no_size_of_requests_waits_forever() -> None:
    generator = random.Random(0)
    for _ in range(200):
        group_size = generator.randint(1, 9)
        sizes = [generator.randint(1, group_size) for _ in range(60)]
        groups = grouped(sizes, group_size)
        taken = [place for group in groups for place in group]
        assert len(taken) == len({*taken})
        for group in groups:
            assert group == sorted(group)
            assert group_size / 2 < sum(sizes[place] for place in group) <= group_size
        waiting = sum(size for place, size in enumerate(sizes) if place not in taken)
        assert waiting < 2 * group_size
