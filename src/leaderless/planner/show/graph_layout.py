"""Places for the boxes of layered graphs, next to each other, and routes for the links, found by `grandalf`.

Boxes stand in even rows, by the longest path to them, and labels of links in the odd rows between. A link over several
rows has a place in each, so that it passes between boxes and not behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from grandalf.graphs import Edge, Graph, Vertex
from grandalf.layouts import SugiyamaLayout, VertexViewer

Point = tuple[float, float]

GAP = 26.0
"""Least distance between neighbors in a row."""
LABEL_ROW = 46.0
"""Least height of a row of labels, with room for lines to bend."""
FAN_HEIGHT = 6.0
"""Height that a row of labels gains with each line of the largest fan above or below it."""
PORT_GAP = 24.0
"""Distance between lines that leave or enter a box on the same side."""
ORDER_ROUNDS = 6
FRAME = 12.0
"""Room between the boxes in a frame and the frame."""
HEAD = 24.0
"""Height of the title of a lane."""


class GraphLink(NamedTuple):
    """A line from a box to one further down, with a label of some width in pixels."""

    source: str
    target: str
    label_width: float


class LinkRoute(NamedTuple):
    """The points of a link, from the lower side of its source to the upper side of its target, and of its label."""

    points: tuple[Point, ...]
    label: Point


class GraphLayout(NamedTuple):
    """Center of every box, the route of every link in the order they were given, and the size of it all."""

    centers: Mapping[str, Point]
    routes: tuple[LinkRoute, ...]
    width: float
    height: float


def place(boxes: Mapping[str, tuple[float, float]], links: Sequence[GraphLink]) -> GraphLayout:
    """Place boxes of some width and height, in pixels; parts that no link connects stand side by side.

    Boxes come after all boxes that have a link to them. There is at most one link between two boxes in each direction.
    """
    vertices = {name: _vertex(width, height) for name, (width, height) in boxes.items()}
    leaving, entering = Counter(link.source for link in links), Counter(link.target for link in links)
    labels, halves = list[Vertex](), list[tuple[Edge, Edge]]()
    for link in links:
        fan = max(leaving[link.source], entering[link.source], leaving[link.target], entering[link.target])
        labels.append(_vertex(link.label_width, LABEL_ROW + FAN_HEIGHT * fan))
        halves.append((Edge(vertices[link.source], labels[-1]), Edge(labels[-1], vertices[link.target])))
    graph = Graph([*vertices.values(), *labels], [edge for pair in halves for edge in pair])
    passed, width, height = dict[Edge, list[Point]](), 0.0, 0.0
    for component in graph.C:
        layout = SugiyamaLayout(component)
        layout.xspace, layout.yspace, layout.dw, layout.dh = GAP, 0.0, 4.0, 4.0
        layout.init_all(roots=[v for v in component.sV if not v.e_in()], inverted_edges=[])
        layout.draw(ORDER_ROUNDS)
        views = [vertex.view for row in layout.layers for vertex in row]
        shift = width + GAP * (width > 0) - min(view.xy[0] - view.w / 2 for view in views)
        for view in views:
            view.xy = (view.xy[0] + shift, view.xy[1])
        width = max(view.xy[0] + view.w / 2 for view in views)
        height = max(height, *(view.xy[1] + view.h / 2 for view in views))
        passed |= {edge: _passed(layout, edge) for edge in component.sE}
    ports = _ports(vertices.values(), passed)
    routes = tuple(
        LinkRoute((ports[first, 0], *passed[first], label.view.xy, *passed[last], ports[last, 1]), label.view.xy)
        for label, (first, last) in zip(labels, halves, strict=True)
    )
    return GraphLayout({name: vertex.view.xy for name, vertex in vertices.items()}, routes, width, height)


def _vertex(width: float, height: float) -> Vertex:
    vertex = Vertex()
    vertex.view = VertexViewer(width, height)
    return vertex


def _passed(layout: SugiyamaLayout, edge: Edge) -> list[Point]:
    """Points of an edge between its ends; it crosses a row of boxes in a straight line."""
    points: list[Point] = []
    for row in sorted(layout.ctrls.get(edge, {}))[1:-1]:
        x, y = layout.ctrls[edge][row].view.xy
        half = max(vertex.view.h for vertex in layout.layers[row]) / 2 if row % 2 == 0 else 0.0
        points += [(x, y - half), (x, y + half)] if half else [(x, y)]
    return points


def _ports(boxes: Iterable[Vertex], passed: Mapping[Edge, Sequence[Point]]) -> dict[tuple[Edge, int], Point]:
    """Where edges leave (0) and enter (1) boxes: next to each other, in the order of where they go or come from."""
    ports: dict[tuple[Edge, int], Point] = {}
    for box in boxes:
        for end, edges in enumerate((box.e_out(), box.e_in())):
            toward = {edge: (passed[edge] or [edge.v[1 - end].view.xy])[-end][0] for edge in edges}
            gap = min(PORT_GAP, (box.view.w - 40) / max(1, len(edges) - 1))
            for place_of, edge in enumerate(sorted(edges, key=toward.__getitem__)):
                x = box.view.xy[0] + (place_of - (len(edges) - 1) / 2) * gap
                ports[edge, end] = (x, box.view.xy[1] + (0.5 - end) * box.view.h)
    return ports


class LaneFrame(NamedTuple):
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

    placement: GraphLayout
    frames: tuple[LaneFrame, ...]
    wires: tuple[Wire, ...]


def place_lanes(
    lanes: Sequence[Mapping[str, tuple[float, float]]],
    links: Sequence[Sequence[GraphLink]],
    wires: Sequence[tuple[int, int]],
    label_width: float,
    title_widths: Sequence[float],
) -> Lanes:
    """Place the boxes of each lane under its title, and lanes from left to right, with room for labels; in pixels."""
    centers, routes, frames = dict[str, Point](), list[LinkRoute](), list[LaneFrame]()
    left, bottom = 0.0, 0.0
    for boxes, own, title_width in zip(lanes, links, title_widths, strict=True):
        placed = place(boxes, own)
        width = max(placed.width, title_width) + 2 * FRAME
        x, y = left + (width - placed.width) / 2, HEAD + FRAME
        centers |= {name: _moved(center, x, y) for name, center in placed.centers.items()}
        routes += [
            LinkRoute(tuple(_moved(point, x, y) for point in route.points), _moved(route.label, x, y))
            for route in placed.routes
        ]
        frames.append(LaneFrame(left, 0.0, width, placed.height + HEAD + 2 * FRAME))
        left, bottom = left + width + label_width + 4 * FRAME, max(bottom, frames[-1].height)
    frames = [frame._replace(height=bottom) for frame in frames]
    width = frames[-1].x + frames[-1].width
    step = (bottom - HEAD) / (len(wires) + 1)
    drawn = [
        _wire(frames[source], frames[target], HEAD + step * number)
        for number, (source, target) in enumerate(wires, start=1)
    ]
    return Lanes(GraphLayout(centers, tuple(routes), width, bottom), tuple(frames), tuple(drawn))


def _wire(source: LaneFrame, target: LaneFrame, y: float) -> Wire:
    """A level line between the sides of two lanes that face each other."""
    is_forward = source.x < target.x
    left, right = (source, target) if is_forward else (target, source)
    ends = (left.x + left.width, y), (right.x, y)
    return Wire(*(ends if is_forward else ends[::-1]), ((ends[0][0] + ends[1][0]) / 2, y))


def _moved(point: Point, x: float, y: float) -> Point:
    return point[0] + x, point[1] + y
