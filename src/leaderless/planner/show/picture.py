"""The plan as a picture: an SVG that stands alone or inside a page, in light and in dark."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from jinja2 import Environment, Template

from leaderless.planner.entries import Repeat, SyncWeights
from leaderless.planner.graph.row_sets import DATA
from leaderless.planner.layout import format_ranks
from leaderless.planner.memory.rank import format_bytes
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Loop, PlannedNode
from leaderless.planner.show.graph_layout import FRAME, GraphLink, LaneFrame, Point, Wire, place, place_lanes

Kind = Literal["local", "reshard", "channel", "weights", "order"]

TEMPLATE = Path(__file__).with_name("plan.svg.jinja")
NUM_COLORS = 6
"""Colors of pools; further pools take the same again."""
NAME_SIZE, TEXT_SIZE, CODE_SIZE = 14.0, 12.0, 11.0
"""Pixels of the font of names, of plain text and of code."""
MARGIN = 24.0
LINE = 18.0
"""Height of a line of text."""
BOX_HEIGHT = 3 * LINE + 18
MAX_TEXT = 240.0
"""Widest text in a box; longer ones are cut there, and complete in the tooltip."""
TEXTS = (("name", NAME_SIZE), ("", TEXT_SIZE), ("code", CODE_SIZE))
"""Style and size of the lines of a box."""
LEGEND: dict[Kind, str] = {
    "local": "columns on the same ranks: nothing moves",
    "reshard": "columns to other ranks, with the most bytes of a step",
    "channel": "rows to another loop, some iterations in flight",
    "weights": "new weights, after each step",
    "order": "order only: no column is read",
}
Values = dict[str, object]
"""Values of one element for the template."""


class _Line(NamedTuple):
    """A line between two boxes: an edge of the plan, weights, or an order without columns."""

    source: str
    target: str
    kind: Kind
    label: str
    tooltip: str

    @property
    def label_width(self) -> float:
        return max(text_width(text, CODE_SIZE) for text in self.label.split("\n")) + 10


def draw_plan(plan: Plan) -> str:
    """Draw the nodes that run, what goes from one to another and how, and the nodes that do not run.

    Returns:
        A self-contained SVG: it loads nothing, has its own background, and follows the reader's color scheme.
    """
    return _template().render(_Picture(plan).values())


@cache
def _template() -> Template:
    """The compiled template: compiling takes longer than drawing."""
    environment = Environment(autoescape=True, finalize=_legal, keep_trailing_newline=True)
    environment.filters["px"] = "{:.1f}".format
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


class _Picture:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.data = [DATA if lane == 0 else f"{DATA} {lane}" for lane in range(len(plan.loops))]
        lanes = [
            [*_edges(plan, loop, data), *_weights(plan, loop), *_orders(plan, loop, data)]
            for loop, data in zip(plan.loops, self.data, strict=True)
        ]
        self.lines = [line for lines in lanes for line in lines]
        self.position = dict.fromkeys(self.data, 0)
        self.position |= {node.name: index for index, node in enumerate(plan.nodes, start=1)}
        prompts, samples = plan.batch.prompts_per_step, plan.batch.samples_per_step
        of_data = DATA, _count(prompts, "prompt") + " a step", f"for {_count(samples, 'sample')}" * (samples != prompts)
        self.texts = dict.fromkeys(self.data, of_data) | {
            node.name: (node.name, node.node.run.rpartition(":")[2] + _role(node), str(node.layout))
            for node in plan.nodes
        }
        self.pools = list(dict.fromkeys(node.layout.ranks for node in plan.nodes))
        self.widths = {
            name: max(
                120.0,
                min(max(text_width(text, size) for text, (_, size) in zip(own, TEXTS, strict=True)), MAX_TEXT) + 28,
            )
            for name, own in self.texts.items()
        }
        links = [[GraphLink(*self._downwards(one), one.label_width) for one in lines] for lines in lanes]
        names = [
            [data] * any(line.source == data for line in lines) + list(loop.nodes)
            for data, loop, lines in zip(self.data, plan.loops, lanes, strict=True)
        ]
        boxes = [{name: (self.widths[name], BOX_HEIGHT) for name in own} for own in names]
        self.titles = [f"loop {loop.name}, ranks {format_ranks(loop.ranks)}, {loop.pace}" for loop in plan.loops]
        self.channels = list(_channels(plan))
        self.frames: tuple[LaneFrame, ...] = ()
        self.wires: tuple[Wire, ...] = ()
        if len(plan.loops) == 1:
            self.placement = place(boxes[0], links[0])
            return
        order = [loop.name for loop in plan.loops]
        ends = [(order.index(line.source), order.index(line.target)) for line in self.channels]
        label_width = max((line.label_width for line in self.channels), default=0.0)
        titles = [text_width(title, TEXT_SIZE) for title in self.titles]
        self.placement, self.frames, self.wires = place_lanes(boxes, links, ends, label_width, titles)

    def _downwards(self, line: _Line) -> tuple[str, str]:
        """Weights go back up to the node that uses them, but a link is placed downwards."""
        is_downward = self.position[line.source] < self.position[line.target]
        return (line.source, line.target) if is_downward else (line.target, line.source)

    def values(self) -> Values:
        """Everything that the template needs."""
        top, placed = MARGIN + 2 * LINE, self.placement
        pruned_top = top + placed.height + LINE
        pruned, pruned_height = self._pruned(pruned_top)
        legend, legend_width, bottom = self._legend(pruned_top + LINE + pruned_height)
        title = f"{self.plan.recipe_name}: workflow {self.plan.workflow} on {_count(self.plan.world_size, 'rank')}"
        width = max(placed.width, legend_width, text_width(title, NAME_SIZE))
        return {
            "title": title,
            "width": width + 2 * MARGIN,
            "height": bottom + MARGIN,
            "left": MARGIN + (width - placed.width) / 2,
            "top": top,
            "margin": MARGIN,
            "line_height": LINE,
            "box_height": BOX_HEIGHT,
            "num_colors": NUM_COLORS,
            "frame": self._frame(),
            "lanes": [{"text": self.titles[lane], "frame": frame} for lane, frame in enumerate(self.frames)],
            "wires": [{"line": line, "wire": self.wires[place]} for place, line in enumerate(self.channels)],
            "links": list(self._links()),
            "boxes": list(self._boxes()),
            "pruned": pruned,
            "pruned_top": pruned_top,
            "legend": legend,
        }

    def _frame(self) -> Values | None:
        """A frame around the nodes that are repeated; as all others come after them, it holds no other box."""
        repeat = self.plan.repeat
        if repeat is None:
            return None
        boxes = [(*self.placement.centers[name], self.widths[name] / 2 + FRAME) for name in repeat.nodes]
        left, right = min(x - half for x, _, half in boxes), max(x + half for x, _, half in boxes)
        half = BOX_HEIGHT / 2 + FRAME
        top, bottom = min(y for _, y, _ in boxes) - half, max(y for _, y, _ in boxes) + half
        return {"text": _repeat_text(repeat), "x": left, "y": top, "width": right - left, "height": bottom - top}

    def _links(self) -> Iterator[Values]:
        for line, route in zip(self.lines, self.placement.routes, strict=True):
            is_downward = self.position[line.source] < self.position[line.target]
            points = route.points if is_downward else route.points[::-1]
            yield {
                "line": line,
                "path": smooth_path(points),
                "x": points[-1][0],
                "y": points[-1][1],
                "direction": 1 if is_downward else -1,
                "label": route.label,
                "label_width": line.label_width - 2,
            }

    def _boxes(self) -> Iterator[Values]:
        for name, (x, y) in self.placement.centers.items():
            kind, tooltip = "data", "the dataloader: every rank reads its own prompts"
            if name not in self.data:
                node = self.plan[name]
                kind, tooltip = f"pool-{self.pools.index(node.layout.ranks) % NUM_COLORS}", _node_tooltip(node)
            styled = zip(self.texts[name], TEXTS, strict=True)
            texts = [(clip(text, size, MAX_TEXT), style) for text, (style, size) in styled if text]
            yield {"kind": kind, "tooltip": tooltip, "x": x, "y": y, "width": self.widths[name], "texts": texts}

    def _pruned(self, top: float) -> tuple[list[Values], float]:
        """Nodes that do not run, in rows of their own, and the height that they take."""
        boxes: list[Values] = []
        x, y, height = MARGIN, top + 2.5 * LINE, 2 * LINE
        for name in self.plan.pruned:
            label = clip(name, NAME_SIZE, MAX_TEXT)
            width = text_width(label, NAME_SIZE) + 24
            if x > MARGIN and x + width > MARGIN + max(self.placement.width, 400):
                x, y = MARGIN, y + height + 8
            boxes.append({"name": name, "label": label, "x": x + width / 2, "y": y, "width": width})
            x += width + 12
        return boxes, y + height - top if boxes else 0.0

    def _legend(self, top: float) -> tuple[list[Values], float, float]:
        """The meaning of lines and colors, as far as they occur, with its width and its lower end."""
        kinds = {line.kind for line in (*self.lines, *self.channels)}
        texts: dict[str, str] = {kind: text for kind, text in LEGEND.items() if kind in kinds}
        if self.plan.repeat is not None:
            texts["repeat"] = _repeat_text(self.plan.repeat)
        items: list[Values] = []
        for kind, text in texts.items():
            items.append({"kind": kind, "text": text, "y": top})
            top += LINE + 2
        width = max(text_width(text, TEXT_SIZE) + 52 for text in texts.values())
        x = MARGIN
        for number, ranks in enumerate(self.pools if len(self.pools) > 1 else ()):
            text = clip(f"ranks {format_ranks(ranks)}", CODE_SIZE, MAX_TEXT)
            items.append({"kind": f"pool-{number % NUM_COLORS}", "text": text, "x": x, "y": top})
            x += text_width(text, CODE_SIZE) + 44
            width = max(width, x - MARGIN)
        return items, width, top


def _edges(plan: Plan, loop: Loop, data: str) -> Iterator[_Line]:
    for edge in plan.edges:
        if edge.kind == "channel" or edge.target not in loop.nodes:
            continue
        size = format_bytes(edge.max_bytes)
        moves = f"to other ranks, at most {size} a step" if edge.kind == "reshard" else "same ranks, nothing moves"
        first, num_more = clip(edge.columns[0], CODE_SIZE, MAX_TEXT), len(edge.columns) - 1
        label = first + f" +{num_more}" * (num_more > 0) + f", {size}" * (edge.kind == "reshard")
        tooltip = f"{edge.source} -> {edge.target} ({moves})\n" + "\n".join(edge.columns)
        yield _Line(data if edge.source == DATA else edge.source, edge.target, edge.kind, label, tooltip)


def _weights(plan: Plan, loop: Loop) -> Iterator[_Line]:
    """From the node that trains a role to the first that uses a copy of it elsewhere."""
    for action in loop.schedule:
        if isinstance(action, SyncWeights):
            trainer = [node.name for node in plan.nodes if (action.role, "train") in node.uses][-1]
            yield _Line(trainer, _users_of(plan, action)[0], "weights", "weights", _weights_text(plan, action))


def _users_of(plan: Plan, action: SyncWeights) -> list[str]:
    users = [node for node in plan.nodes if action.role in dict(node.uses)]
    return [node.name for node in users if node.layout.holds_rows_like(action.target_layout)]


def _weights_text(plan: Plan, action: SyncWeights) -> str:
    ranks = f"{format_ranks(action.source_layout.ranks)} -> {format_ranks(action.target_layout.ranks)}"
    names = ", ".join(_users_of(plan, action))
    return f"weights of {action.role}, ranks {ranks}, after each step\nfor {names}"


def _orders(plan: Plan, loop: Loop, data: str) -> Iterator[_Line]:
    """For a node that reads no column: what it comes after."""
    running = {node.name for node in plan.nodes}
    for node in plan.nodes:
        if not node.reads and node.name in loop.nodes:
            for name in [name for name in node.node.after if name in running] or [data]:
                if name == data or name in loop.nodes:
                    tooltip = f"{node.name} comes after {DATA if name == data else name} and reads none of its columns"
                    yield _Line(name, node.name, "order", "", tooltip)


def _channels(plan: Plan) -> Iterator[_Line]:
    """Lines between two loops; the label has two lines of text."""
    for channel in plan.channels:
        note = f"{channel.capacity} in flight, at most {_count(channel.max_staleness, 'update')} old"
        line = partial(_Line, channel.source, channel.target, label=f"{channel.name}\n{note}")
        if channel.sync is not None:
            yield line(kind="weights", tooltip=_weights_text(plan, channel.sync))
        elif channel.reshards:
            sent = [f"{', '.join(move.columns) or 'rows'} of {move.source}" for move in channel.reshards]
            yield line(kind="channel", tooltip="\n".join(sent))


def _role(node: PlannedNode) -> str:
    roles = dict.fromkeys(role for role, _ in node.uses)
    return f", role{'s' * (len(roles) > 1)} {', '.join(roles)}" if roles else ""


def _node_tooltip(node: PlannedNode) -> str:
    reads = ", ".join(f"{column} of {source}" for column, source in node.reads.items())
    writes, what = ", ".join(node.writes), f"{node.name}: {node.spec.summary or node.node.run}"
    run = f"run {node.node.run}{_role(node)}"
    return "\n".join([what, run, str(node.layout), f"reads {reads or 'nothing'}", f"writes {writes or 'nothing'}"])


def _repeat_text(repeat: Repeat) -> str:
    return (
        f"repeated until {_count(repeat.num_groups, 'group')} have come out of {repeat.last}, "
        f"at most {_count(repeat.max_rounds, 'time')} a step; others wait for the next"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _legal(value: object) -> object:
    """Text without the characters that XML cannot hold."""
    if not isinstance(value, str):
        return value
    return type(value)(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", value))


def text_width(text: str, size: float) -> float:
    """Width of a text, estimated on the wide side: fonts differ from reader to reader."""
    return sum(size if unicodedata.east_asian_width(letter) in "WF" else 0.6 * size for letter in text)


def clip(text: str, size: float, width: float) -> str:
    """A text that fits, with an ellipsis where it had to be cut."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text, size) > width - size:
        text = text[:-1]
    return text + "…"


def smooth_path(points: Sequence[Point]) -> str:
    """A smooth line that begins and ends upright and does not swing beyond its points, from top to bottom or back.

    The slope at a point is the harmonic mean of the slopes to its neighbors, or none where they differ in sign
    (Fritsch and Carlson, Monotone Piecewise Cubic Interpolation, 1980).
    """
    chords = [(x2 - x1) / (y2 - y1) for (x1, y1), (x2, y2) in pairwise(points)]
    slopes = [0.0, *(2 * a * b / (a + b) if a * b > 0 else 0.0 for a, b in pairwise(chords)), 0.0]
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for ((x1, y1), (x2, y2)), (slope1, slope2) in zip(pairwise(points), pairwise(slopes), strict=True):
        third = (y2 - y1) / 3
        parts.append(f"C{x1 + slope1 * third:.1f} {y1 + third:.1f} {x2 - slope2 * third:.1f} {y2 - third:.1f}")
        parts.append(f" {x2:.1f} {y2:.1f}")
    return "".join(parts)
