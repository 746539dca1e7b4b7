"""The plan as a picture: an SVG that stands alone or inside a page, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from leaderless.planner.flow import DATA
from leaderless.planner.layering import Box, Link, Placement, place
from leaderless.planner.layout import format_ranks
from leaderless.planner.memory import format_bytes
from leaderless.planner.plan import Loop, Plan, PlannedNode, SyncWeights
from leaderless.planner.svg import (
    CODE_SIZE,
    NAME_SIZE,
    NUM_COLORS,
    STYLE,
    TEXT_SIZE,
    arrow_head,
    attribute,
    clip,
    rounded_box,
    smooth_path,
    text_at,
    text_width,
    xml,
)

Kind = Literal["local", "reshard", "weights", "order"]

MARGIN = 24.0
LINE = 18.0
"""Height of a line of text."""
BOX_HEIGHT = 3 * LINE + 18
MAX_TEXT = 240.0
"""Widest text in a box; what is longer is cut there and stands in full in the tooltip."""
TEXTS = (("name", NAME_SIZE), ("", TEXT_SIZE), ("code", CODE_SIZE))
"""Style and size of the lines of a box."""

LEGEND: dict[Kind, str] = {
    "local": "columns on the same ranks: nothing moves",
    "reshard": "columns to other ranks, at most so many bytes a step",
    "weights": "new weights, after each step",
    "order": "order only: no column is read",
}
FRAME = 12.0
"""Room between a loop's boxes and the frame around them."""


@dataclass(frozen=True)
class _Line:
    """A line between two boxes: an edge of the plan, weights, or an order without columns."""

    source: str
    target: str
    kind: Kind
    label: str
    tooltip: str


def draw_plan(plan: Plan) -> str:
    """Draw the nodes that run, what goes from one to another and how, and the nodes that are left out.

    Args:
        plan: Any plan.

    Returns:
        A self-contained SVG: it loads nothing, brings its own background, and follows the reader's colour scheme.
    """
    return _Picture(plan).svg()


class _Picture:
    """A plan with everything placed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lines = [*_edges(plan), *_weights(plan), *_orders(plan)]
        self.position = {DATA: 0} | {node.name: index for index, node in enumerate(plan.nodes, start=1)}
        self.texts = {DATA: _data_texts(plan)} | {node.name: _node_texts(node) for node in plan.nodes}
        self.pools = list(dict.fromkeys(node.layout.ranks for node in plan.nodes))
        self.boxes = {name: Box(name, _box_width(texts), BOX_HEIGHT) for name, texts in self.texts.items()}
        self.placement = self._place()

    def _place(self) -> Placement:
        links = []
        for line in self.lines:
            # Weights go back up to the node that uses them, but a link is placed downwards.
            upper, lower = sorted((line.source, line.target), key=self.position.__getitem__)
            links.append(Link(upper, lower, text_width(line.label, CODE_SIZE) + 10))
        return place(list(self.boxes.values()), links)

    def svg(self) -> str:
        """The whole document."""
        top = MARGIN + 2 * LINE
        pruned, pruned_height = self._pruned(top + self.placement.height + LINE)
        legend_top = top + self.placement.height + 2 * LINE + pruned_height
        legend, legend_width, legend_height = self._legend(legend_top)
        title = f"{self.plan.recipe_name}: workflow {self.plan.workflow} on {_count(self.plan.world_size, 'rank')}"
        content_width = max(self.placement.width, legend_width, text_width(title, NAME_SIZE))
        size = f'width="{content_width + 2 * MARGIN:.0f}" height="{legend_top + legend_height + MARGIN:.0f}"'
        view = size.replace('width="', "0 0 ").replace('" height="', " ").rstrip('"')
        shift = MARGIN + (content_width - self.placement.width) / 2
        start = f'<svg xmlns="http://www.w3.org/2000/svg" class="leaderless-plan" {size} viewBox="{view}" role="img"'
        parts = [
            f"{start} aria-label={attribute(title)}>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" {size}/>',
            text_at(title, (MARGIN, MARGIN + NAME_SIZE), "name", "start"),
            f'<g transform="translate({shift:.1f} {top:.1f})">',
            *self._loop(),
            *self._links(),
            *self._boxes(),
            "</g>",
            *pruned,
            *legend,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _loop(self) -> Iterator[str]:
        """A frame around the nodes that are repeated; as all others come after them, it holds no other box."""
        loop = self.plan.loop
        if loop is None:
            return
        boxes = [(self.placement.centers[name], self.boxes[name].width / 2 + FRAME) for name in loop.nodes]
        left, right = min(x - half for (x, _), half in boxes), max(x + half for (x, _), half in boxes)
        half = BOX_HEIGHT / 2 + FRAME
        top, bottom = min(y for (_, y), _ in boxes) - half, max(y for (_, y), _ in boxes) + half
        yield f'<g class="loop"><title>{xml(_loop_text(loop))}</title>'
        yield f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" rx="14"/></g>'

    def _links(self) -> Iterator[str]:
        for line, route in zip(self.lines, self.placement.routes, strict=True):
            is_downward = self.position[line.source] < self.position[line.target]
            points = route.points if is_downward else route.points[::-1]
            path = smooth_path(points)
            x, y = route.label
            yield f'<g class="link {line.kind}"><title>{xml(line.tooltip)}</title>'
            yield f'<path class="reach" d="{path}"/><path class="run" d="{path}"/>'
            yield arrow_head(points[-1], is_downward=is_downward)
            if line.label:
                yield rounded_box(route.label, text_width(line.label, CODE_SIZE) + 8, LINE)
                yield text_at(line.label, (x, y + 4), "code")
            yield "</g>"

    def _boxes(self) -> Iterator[str]:
        for name, (x, y) in self.placement.centers.items():
            kind, tooltip = "data", "the dataloader: every rank reads its own prompts"
            if name != DATA:
                node = self.plan[name]
                kind, tooltip = f"pool-{self.pools.index(node.layout.ranks) % NUM_COLORS}", _node_tooltip(node)
            yield f'<g class="box {kind}"><title>{xml(tooltip)}</title>'
            yield rounded_box((x, y), self.boxes[name].width, BOX_HEIGHT, "paper")
            yield rounded_box((x, y), self.boxes[name].width, BOX_HEIGHT)
            texts = [(clip(text, size, MAX_TEXT), style) for text, (style, size) in _styled(self.texts[name]) if text]
            for number, (text, style) in enumerate(texts):
                yield text_at(text, (x, y + (number - (len(texts) - 1) / 2) * LINE + 5), style)
            yield "</g>"

    def _pruned(self, top: float) -> tuple[list[str], float]:
        """Nodes that do not run, as ghosts in rows of their own, and the height that they take."""
        if not self.plan.pruned:
            return [], 0.0
        parts = [text_at("not needed with these settings", (MARGIN, top + TEXT_SIZE), anchor="start")]
        x, y, height = MARGIN, top + 2.5 * LINE, 2 * LINE
        for name in self.plan.pruned:
            label = clip(name, NAME_SIZE, MAX_TEXT)
            width = text_width(label, NAME_SIZE) + 24
            if x > MARGIN and x + width > MARGIN + max(self.placement.width, 400):
                x, y = MARGIN, y + height + 8
            tooltip = f"{name} does not run: nobody reads what it writes"
            parts.append(f'<g class="pruned"><title>{xml(tooltip)}</title>')
            parts.append(rounded_box((x + width / 2, y), width, height))
            parts.append(text_at(label, (x + width / 2, y + 5), "name") + "</g>")
            x += width + 12
        return parts, y + height - top

    def _legend(self, top: float) -> tuple[list[str], float, float]:
        """What the lines and colours mean, as far as they occur, and the width and height of it."""
        parts: list[str] = []
        width, y = 0.0, top
        for kind in [kind for kind in LEGEND if any(line.kind == kind for line in self.lines)]:
            parts.append(f'<g class="link {kind}"><path class="run" d="M{MARGIN} {y}h40"/></g>')
            parts.append(text_at(LEGEND[kind], (MARGIN + 52, y + 4), anchor="start"))
            width, y = max(width, text_width(LEGEND[kind], TEXT_SIZE) + 52), y + LINE + 2
        if self.plan.loop is not None:
            text = _loop_text(self.plan.loop)
            parts.append(f'<g class="loop"><rect x="{MARGIN}" y="{y - 6}" width="40" height="12" rx="4"/></g>')
            parts.append(text_at(text, (MARGIN + 52, y + 4), anchor="start"))
            width, y = max(width, text_width(text, TEXT_SIZE) + 52), y + LINE + 2
        x = MARGIN
        for number, ranks in enumerate(self.pools if len(self.pools) > 1 else ()):
            text = clip(f"ranks {format_ranks(ranks)}", CODE_SIZE, MAX_TEXT)
            parts.append(f'<g class="box pool-{number % NUM_COLORS}">{rounded_box((x + 8, y + 4), 16, 16)}</g>')
            parts.append(text_at(text, (x + 24, y + 8), "code", "start"))
            x += text_width(text, CODE_SIZE) + 44
            width = max(width, x - MARGIN)
        return parts, width, y - top


def _edges(plan: Plan) -> Iterator[_Line]:
    for edge in plan.edges:
        size = format_bytes(edge.max_bytes)
        moves = f"to other ranks, at most {size} a step" if edge.kind == "reshard" else "same ranks, nothing moves"
        label = _columns_label(edge.columns) + (f", {size}" if edge.kind == "reshard" else "")
        tooltip = f"{edge.source} -> {edge.target} ({moves})\n" + "\n".join(edge.columns)
        yield _Line(edge.source, edge.target, edge.kind, label, tooltip)


def _weights(plan: Plan) -> Iterator[_Line]:
    """From the node that trains a role to the first that uses a copy of it elsewhere."""
    for action in plan.schedule:
        if isinstance(action, SyncWeights):
            users = [node for node in plan.nodes if node.node.role == action.role]
            trainer = [node for node in users if node.spec.role_use == "train"][-1]
            served = [node for node in users if node.layout.holds_rows_like(action.target_layout)]
            ranks = f"{format_ranks(action.source_layout.ranks)} -> {format_ranks(action.target_layout.ranks)}"
            names = ", ".join(node.name for node in served)
            tooltip = f"weights of {action.role}, ranks {ranks}, after each step\nfor {names}"
            yield _Line(trainer.name, served[0].name, "weights", "weights", tooltip)


def _orders(plan: Plan) -> Iterator[_Line]:
    """For a node that reads no column: what it comes after."""
    running = {node.name for node in plan.nodes}
    for node in plan.nodes:
        if not node.reads:
            for name in [name for name in node.node.after if name in running] or [DATA]:
                tooltip = f"{node.name} comes after {name} and reads none of its columns"
                yield _Line(name, node.name, "order", "", tooltip)


def _node_texts(node: PlannedNode) -> tuple[str, str, str]:
    stage = node.node.run.rpartition(":")[2]
    return node.name, f"{stage}, role {node.node.role}" if node.node.role else stage, str(node.layout)


def _data_texts(plan: Plan) -> tuple[str, str, str]:
    prompts, samples = plan.batch.prompts_per_step, plan.batch.samples_per_step
    is_sampled = samples != prompts
    return DATA, _count(prompts, "prompt") + " a step", f"for {_count(samples, 'sample')}" if is_sampled else ""


def _node_tooltip(node: PlannedNode) -> str:
    role = f", role {node.node.role}" if node.node.role else ""
    reads = ", ".join(f"{column} of {source}" for column, source in node.reads.items())
    facts = [f"{node.name}: {node.spec.summary or node.node.run}", f"run {node.node.run}{role}", str(node.layout)]
    return "\n".join([*facts, f"reads {reads or 'nothing'}", f"writes {', '.join(node.writes) or 'nothing'}"])


def _loop_text(loop: Loop) -> str:
    return (
        f"repeated until {_count(loop.num_groups, 'group')} have come out of {loop.last}, "
        f"at most {_count(loop.max_rounds, 'time')} a step; others wait for the next"
    )


def _columns_label(columns: Sequence[str]) -> str:
    first = clip(columns[0], CODE_SIZE, MAX_TEXT)
    return f"{first} +{len(columns) - 1}" if len(columns) > 1 else first


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _box_width(texts: tuple[str, str, str]) -> float:
    return max(120.0, max(min(text_width(text, size), MAX_TEXT) for text, (_, size) in _styled(texts)) + 28)


def _styled(texts: tuple[str, str, str]) -> Iterator[tuple[str, tuple[str, float]]]:
    return zip(texts, TEXTS, strict=True)
