"""What goes from one node to another: columns, how, and how many bytes at most."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.config import Recipe
from leaderless.planner.entries import Reshard
from leaderless.planner.parts import Edge, EdgeKind, Loop, PlannedNode
from leaderless.planner.row_sets import DATA
from leaderless.planner.schedule import is_expanded
from leaderless.workflow.columns import EXPERTS_PER_TOKEN, IMAGE_BYTES_PER_TOKEN, column_of


def edges_of(recipe: Recipe, nodes: Sequence[PlannedNode], loops: Sequence[Loop]) -> tuple[Edge, ...]:
    """The columns between nodes, by reader and the node that it reads from."""
    layouts = {node.name: node.layout for node in nodes}
    loop_of = {name: loop.name for loop in loops for name in loop.nodes}
    edges: list[Edge] = []
    for node in nodes:
        is_sampled = is_expanded(nodes, node.row_set)
        for source in sorted(set(node.reads.values())):
            columns = tuple(column for column, provider in node.reads.items() if provider == source)
            kind: EdgeKind = "channel" if loop_of.get(source, loop_of[node.name]) != loop_of[node.name] else "reshard"
            if source == DATA or layouts[source].holds_rows_like(node.layout):
                kind = "local"
            size = sum(_max_bytes(recipe, column, node.node.agents, is_sampled=is_sampled) for column in columns)
            edges.append(Edge(source, node.name, columns, kind, size))
    return tuple(edges)


def bytes_in_flight(recipe: Recipe, nodes: Sequence[PlannedNode], reshards: Sequence[Reshard]) -> int:
    """Most bytes that a rank holds of one iteration's rows, every sequence as long as it may be.

    A column is held once, however many layouts it is sent to.
    """
    held: dict[tuple[str, str], int] = {}
    for reshard in reshards:
        source = next(node for node in nodes if node.name == reshard.source)
        is_sampled = is_expanded(nodes, reshard.row_set)
        for column in reshard.columns:
            size = _max_bytes(recipe, column, source.node.agents, is_sampled=is_sampled)
            held[reshard.source, column] = -(-size // reshard.source_layout.dp)
    return sum(held.values())


def _max_bytes(recipe: Recipe, name: str, agents: Sequence[str], *, is_sampled: bool) -> int:
    """Bytes of a column over all ranks, every sequence as long as it may be."""
    column, data, batch = column_of(name), recipe.data, recipe.batch
    response = recipe.longest_response(agents) if is_sampled else data.max_response_tokens
    longest = {
        None: 1,
        "prompt_tokens": data.max_prompt_tokens,
        "image_bytes": data.max_prompt_tokens * IMAGE_BYTES_PER_TOKEN,
        "later_image_bytes": response * IMAGE_BYTES_PER_TOKEN,
        "experts": (data.max_prompt_tokens + response) * EXPERTS_PER_TOKEN,
    }.get(column.axis, response)
    siblings = batch.responses_per_prompt * max(1, len(agents)) if is_sampled and not column.is_prompt else 1
    return batch.prompts_per_step * siblings * longest * column.item_bytes
