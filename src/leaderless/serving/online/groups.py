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
    complete: list[list[int]] = []
    growing: list[tuple[int, list[int]]] = []  # room and places of each; few, as those that are passed are complete
    for place, size in enumerate(sizes):
        chosen = next((number for number, (room, _) in enumerate(growing) if room >= size), len(growing))
        if chosen == len(growing):
            growing.append((group_size, []))
        room, group = growing[chosen]
        growing[chosen] = room - size, [*group, place]
        is_complete = [
            not room or (number < chosen and 2 * room < group_size) for number, (room, _) in enumerate(growing)
        ]
        complete += [group for (_, group), is_done in zip(growing, is_complete, strict=True) if is_done]
        growing = [one for one, is_done in zip(growing, is_complete, strict=True) if not is_done]
    return sorted(complete)
