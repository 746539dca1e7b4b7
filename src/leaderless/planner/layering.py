"""Places for the boxes of a layered graph and routes for the links between them: few crossings, nothing overlaps.

Boxes stand in even rows, by the longest path to them, and labels of links in the odd rows between. A link over several
rows has a place in each, so that it passes between boxes and not behind them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from leaderless.planner.svg import Point

GAP = 26.0
"""Least distance between neighbours in a row."""
LABEL_ROW = 54.0
"""Least height of a row of labels, with room for lines to bend."""
FAN_HEIGHT = 6.0
"""What each line that leaves or enters a box adds to it."""
PORT_GAP = 24.0
"""Distance between lines that leave or enter a box on the same side."""
STRAIGHTNESS = 8.0
"""How much more a line between two boxes wants to be straight than to be short."""
ORDER_SWEEPS = 12
PLACE_SWEEPS = 100


@dataclass(frozen=True)
class Box:
    """Something to place; sizes are in pixels."""

    name: str
    width: float
    height: float


@dataclass(frozen=True)
class Link:
    """A line from a box to one further down, with a label of some width in pixels."""

    source: str
    target: str
    label_width: float


@dataclass(frozen=True)
class Route:
    """Where a link runs: from the lower side of its source to the upper side of its target."""

    points: tuple[Point, ...]
    label: Point


@dataclass(frozen=True)
class Placement:
    """Centre of every box, the route of every link in the order they were given, and the size of it all."""

    centers: Mapping[str, Point]
    routes: tuple[Route, ...]
    width: float
    height: float


def place(boxes: Sequence[Box], links: Sequence[Link]) -> Placement:
    """Place a graph.

    Args:
        boxes: Each behind all boxes that have a link to it.
        links: At most one between two boxes in each direction.
    """
    graph = _build(boxes, links)
    _reduce_crossings(graph)
    x = _columns(graph)
    heights = [_height(graph, boxes, number) for number in range(len(graph.rows))]
    top = [sum(heights[:number]) for number in range(len(heights) + 1)]
    lines = _Routes(graph, boxes, x, top)
    centers = {box.name: (x[v], lines.middle(graph.row_of[v])) for v, box in enumerate(boxes)}
    routes = tuple(lines.route(chain, label) for chain, label in zip(graph.chains, graph.labels, strict=True))
    width = max(x[v] + graph.widths[v] / 2 for v in range(len(x)))
    return Placement(centers, routes, width, top[-1])


def _height(graph: _Graph, boxes: Sequence[Box], number: int) -> float:
    """Of a row: of its boxes, or of its labels with more room the more lines fan out of a box above or below it."""
    if number % 2 == 0:
        return max(boxes[v].height for v in graph.rows[number] if not graph.is_passing(v))
    fans = [graph.below[v] for v in graph.rows[number - 1]] + [graph.above[v] for v in graph.rows[number + 1]]
    return LABEL_ROW + FAN_HEIGHT * max(len(fan) for fan in fans)


@dataclass
class _Graph:
    """Boxes, and a vertex for each row that a link passes; every edge joins neighbouring rows.

    Attributes:
        num_boxes: They are the first vertices, in their order.
        widths: Of each vertex.
        row_of: Row of each vertex.
        rows: Vertices of each row, from left to right.
        chains: For each link its vertices, from source to target.
        labels: For each link the vertex where its label stands.
        above: Neighbours of each vertex one row up.
        below: Neighbours of each vertex one row down.
    """

    num_boxes: int
    widths: list[float] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    chains: list[list[int]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    above: list[list[int]] = field(default_factory=list)
    below: list[list[int]] = field(default_factory=list)

    def is_passing(self, vertex: int) -> bool:
        """Whether it is a place on a link, and no box."""
        return vertex >= self.num_boxes

    def add(self, row: int, width: float) -> int:
        """A new vertex at the right end of a row."""
        while len(self.rows) <= row:
            self.rows.append([])
        vertex = len(self.widths)
        self.rows[row].append(vertex)
        self.row_of.append(row)
        self.widths.append(width)
        self.above.append([])
        self.below.append([])
        return vertex


def _build(boxes: Sequence[Box], links: Sequence[Link]) -> _Graph:
    graph = _Graph(len(boxes))
    index = {box.name: v for v, box in enumerate(boxes)}
    for box in boxes:
        above = [graph.row_of[index[link.source]] for link in links if link.target == box.name]
        graph.add(2 + max(above) if above else 0, box.width)
    for link in links:
        first, last = index[link.source], index[link.target]
        rows = range(graph.row_of[first] + 1, graph.row_of[last])
        label = len(rows) // 4 * 2
        passed = [graph.add(row, link.label_width if number == label else 4.0) for number, row in enumerate(rows)]
        chain = [first, *passed, last]
        for upper, lower in pairwise(chain):
            graph.below[upper].append(lower)
            graph.above[lower].append(upper)
        graph.chains.append(chain)
        graph.labels.append(passed[label])
    return graph


def _reduce_crossings(graph: _Graph) -> None:
    """Sort each row by the middle of its neighbours, down and up in turn; the best order found stays."""
    best, fewest = [list(row) for row in graph.rows], _crossings(graph)
    for sweep in range(ORDER_SWEEPS):
        is_down = sweep % 2 == 0
        neighbours = graph.above if is_down else graph.below
        for row in graph.rows if is_down else reversed(graph.rows):
            place_of = {v: place for other in graph.rows for place, v in enumerate(other)}
            middle = {
                v: sum(place_of[n] for n in neighbours[v]) / len(neighbours[v]) if neighbours[v] else float(place_of[v])
                for v in row
            }
            row.sort(key=middle.__getitem__)
        count = _crossings(graph)
        if count < fewest:
            best, fewest = [list(row) for row in graph.rows], count
    graph.rows = best


def _crossings(graph: _Graph) -> int:
    """Pairs of lines that cross."""
    count = 0
    for upper, lower in pairwise(graph.rows):
        place_of = {v: place for place, v in enumerate(lower)}
        seen: list[int] = []
        for v in upper:
            ends = sorted(place_of[n] for n in graph.below[v])
            count += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


def _columns(graph: _Graph) -> list[float]:
    """Horizontal centre of each vertex, the leftmost edge at 0; rows come as near to their neighbours as may be.

    Lines that only pass through a row pull hardest, so that they become straight and boxes make way.
    """
    pulls = [
        [(n, STRAIGHTNESS if graph.is_passing(v) and graph.is_passing(n) else 1.0) for n in (*above, *below)]
        for v, (above, below) in enumerate(zip(graph.above, graph.below, strict=True))
    ]
    x = [0.0] * len(graph.widths)
    for sweep in range(PLACE_SWEEPS):
        for row in graph.rows if sweep % 2 == 0 else reversed(graph.rows):
            weights = [sum(pull for _, pull in pulls[v]) or 1.0 for v in row]
            wanted = [
                sum(x[n] * pull for n, pull in pulls[v]) / weight if pulls[v] else x[v]
                for v, weight in zip(row, weights, strict=True)
            ]
            for vertex, place_x in zip(row, _fit(graph, row, wanted, weights), strict=True):
                x[vertex] = place_x
    left = min(x[v] - graph.widths[v] / 2 for v in range(len(x)))
    return [value - left for value in x]


def _fit(graph: _Graph, row: Sequence[int], wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The places nearest to those wanted, in the sense of least squares, that keep order and distance.

    With the distances taken off, this is isotonic regression: neighbours that would overlap move as one block.
    """
    offset = 0.0
    offsets: list[float] = []
    for place_in_row, vertex in enumerate(row):
        if place_in_row:
            offset += (graph.widths[row[place_in_row - 1]] + graph.widths[vertex]) / 2 + GAP
        offsets.append(offset)
    blocks: list[tuple[float, float, int]] = []
    for target, shift, weight in zip(wanted, offsets, weights, strict=True):
        mean, total, size = target - shift, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, more, count = blocks.pop()
            mean = (mean * total + other * more) / (total + more)
            total, size = total + more, size + count
        blocks.append((mean, total, size))
    fitted = [mean for mean, _, size in blocks for _ in range(size)]
    return [value + shift for value, shift in zip(fitted, offsets, strict=True)]


@dataclass(frozen=True)
class _Routes:
    """Turns chains of vertices into lines, once everything has its place."""

    graph: _Graph
    boxes: Sequence[Box]
    x: Sequence[float]
    top: Sequence[float]

    def middle(self, row: int) -> float:
        """Half-way down a row."""
        return (self.top[row] + self.top[row + 1]) / 2

    def route(self, chain: Sequence[int], label: int) -> Route:
        """The points of a link; it crosses a row of boxes in a straight line."""
        graph, x = self.graph, self.x
        source, target = chain[0], chain[-1]
        points = [(self._port(source, chain[1], graph.below), self._side(source, 0.5))]
        for vertex in chain[1:-1]:
            row = graph.row_of[vertex]
            heights = (self.middle(row),) if row % 2 else (self.top[row], self.top[row + 1])
            points += [(x[vertex], height) for height in heights]
        points.append((self._port(target, chain[-2], graph.above), self._side(target, -0.5)))
        return Route(tuple(points), (x[label], self.middle(graph.row_of[label])))

    def _side(self, box: int, side: float) -> float:
        """Height of a box's lower (0.5) or upper (-0.5) side."""
        return self.middle(self.graph.row_of[box]) + side * self.boxes[box].height

    def _port(self, box: int, neighbour: int, neighbours: Sequence[Sequence[int]]) -> float:
        """Where a link meets the side of a box: beside the others, in the order that they leave in."""
        others = sorted(neighbours[box], key=self.x.__getitem__)
        gap = min(PORT_GAP, (self.boxes[box].width - 40) / max(1, len(others) - 1))
        return self.x[box] + (others.index(neighbour) - (len(others) - 1) / 2) * gap
