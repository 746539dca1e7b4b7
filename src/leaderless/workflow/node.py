"""One unit of a workflow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A stage function in its place in the graph.

    Attributes:
        name: Unique within the workflow.
        run: Built-in stage, or `package.module:function`.
        role: Model that it uses, if any.
        after: Nodes that it comes after; without any, it begins with the data.
    """

    name: str
    run: str
    role: str | None = None
    after: tuple[str, ...] = ()
