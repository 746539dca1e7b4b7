"""Lanes of a picture: the loops of a plan next to each other, and the channels between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from leaderless.planner.layering import Link, Placement, Point, Route, place

FRAME = 12.0
"""Room between the boxes in a frame and the frame."""
HEAD = 24.0
"""Height of the title of a lane."""


class Frame(NamedTuple):
    """A frame around boxes: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float


class Wire(NamedTuple):
    """A line from the side of one lane to the side of another, and the place of its label."""

    begin: Point
    end: Point
    label: Point


class Lanes(NamedTuple):
    """All boxes and links, a frame for each lane, and a wire for each channel, in the order they were given."""

    placement: Placement
    frames: tuple[Frame, ...]
    wires: tuple[Wire, ...]


def place_lanes(
    lanes: Sequence[Mapping[str, tuple[float, float]]],
    links: Sequence[Sequence[Link]],
    wires: Sequence[tuple[int, int]],
    label_width: float,
    title_widths: Sequence[float],
) -> Lanes:
    """Place the boxes of each lane under its title, and lanes from left to right.

    Args:
        lanes: Width and height of each box, by lane.
        links: Links between the boxes of a lane, by lane.
        wires: Lanes that each wire goes from and to.
        label_width: Width of the widest label of a wire, in pixels.
        title_widths: Width of each lane's title, in pixels.
    """
    centers, routes, frames = dict[str, Point](), list[Route](), list[Frame]()
    left, bottom = 0.0, 0.0
    for boxes, own, title_width in zip(lanes, links, title_widths, strict=True):
        placed = place(boxes, own)
        width = max(placed.width, title_width) + 2 * FRAME
        x, y = left + (width - placed.width) / 2, HEAD + FRAME
        centers |= {name: _moved(center, x, y) for name, center in placed.centers.items()}
        routes += [
            Route(tuple(_moved(point, x, y) for point in route.points), _moved(route.label, x, y))
            for route in placed.routes
        ]
        frames.append(Frame(left, 0.0, width, placed.height + HEAD + 2 * FRAME))
        left, bottom = left + width + label_width + 4 * FRAME, max(bottom, frames[-1].height)
    frames = [frame._replace(height=bottom) for frame in frames]
    width = frames[-1].x + frames[-1].width
    step = (bottom - HEAD) / (len(wires) + 1)
    drawn = [
        _wire(frames[source], frames[target], HEAD + step * number)
        for number, (source, target) in enumerate(wires, start=1)
    ]
    return Lanes(Placement(centers, tuple(routes), width, bottom), tuple(frames), tuple(drawn))


def _wire(source: Frame, target: Frame, y: float) -> Wire:
    """A level line between the sides of two lanes that face each other."""
    is_forward = source.x < target.x
    left, right = (source, target) if is_forward else (target, source)
    ends = (left.x + left.width, y), (right.x, y)
    return Wire(*(ends if is_forward else ends[::-1]), ((ends[0][0] + ends[1][0]) / 2, y))


def _moved(point: Point, x: float, y: float) -> Point:
    return point[0] + x, point[1] + y
