"""One unit of a workflow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A stage function in its place in the graph.

    Attributes:
        name: Unique within the workflow.
        run: A registered stage, or `package.module:function`.
        role: The model that it uses, if it uses one.
        after: Nodes that it comes after; a node after none begins with the data.
    """

    name: str
    run: str
    role: str | None = None
    after: tuple[str, ...] = ()
