"""How the responses of requests become groups."""

from __future__ import annotations

from collections.abc import Sequence


def grouped(sizes: Sequence[int], group_size: int) -> list[list[int]]:
    """The groups that are complete, in the order of their first requests.

    Each request goes into the first group that is not complete and has room for all of its responses. A group is
    complete when it is full, or more than half full when a later request does not fit into it; so no size of requests
    waits forever.

    Args:
        sizes: Number of responses of each request, in the order in which requests came; each at most `group_size`.
        group_size: Number of responses of a full group.

    Returns:
        Places of the requests of each group.
    """
    groups: list[list[int]] = []
    rooms: list[int] = []
    is_passed: list[bool] = []
    for place, size in enumerate(sizes):
        chosen = next((number for number, room in enumerate(rooms) if room >= size and not is_passed[number]), None)
        for number in range(len(rooms) if chosen is None else chosen):
            is_passed[number] = is_passed[number] or 2 * rooms[number] < group_size
        if chosen is None:
            groups.append([place])
            rooms.append(group_size - size)
            is_passed.append(False)
        else:
            groups[chosen].append(place)
            rooms[chosen] -= size
    return [group for group, room, passed in zip(groups, rooms, is_passed, strict=True) if passed or not room]
