"""Texts as a tree, in which what several of them begin with is there once.

Branches of an episode, conversations of its agents before and after they were shortened, and responses that begin with
the same words have more in common than a prompt. A pass computes each part of such a tree once (as in Wang et al.,
"Tree Training", arXiv 2511.00413).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leaderless.models.attention.shared_prompts import Family

LEAST_SHARED = 16
"""Fewest tokens of a part that several texts share: attention to it takes a call of its own in each layer."""

Tokens = NDArray[np.int64]


class TreeOrder(NamedTuple):
    """Texts in depth-first order: those that share most are next to each other.

    Attributes:
        texts: Their numbers.
        shared: Number of first tokens that each has in common with the one before it; 0 for the first.
    """

    texts: list[int]
    shared: list[int]


@dataclass
class _Node:
    """The texts that have as many first tokens in common as `depth` says, below the nodes that some of them share."""

    depth: int
    children: list[_Node | int] = field(default_factory=list)
    total: int = 0
    first: int = 0


def tree_order(texts: Sequence[Tokens], least: int = LEAST_SHARED) -> TreeOrder:
    """Order texts by what they share; of two branches, the one with more tokens comes first, or the earlier one.

    Args:
        texts: [n] int64 tokens each.
        least: Fewest tokens of a shared part; of shorter ones each text has its own.
    """
    if len(texts) == 1:
        return TreeOrder([0], [0])
    # Of texts in the order of their bytes, neighbors have most in common.
    keys = [text.astype(">i8").tobytes() for text in texts]
    order = sorted(range(len(texts)), key=keys.__getitem__)
    common = [_num_common(texts[one], texts[other]) for one, other in pairwise(order)]
    root = _tree(order, common)
    _merge(root, least)
    _measure(root, [len(text) for text in texts])
    return _depth_first(root)


def family_of(prompt: int, lengths: Sequence[int], shared: Sequence[int]) -> Family:
    """The tree of a prompt and of rows in their order, by their lengths and by what each shares with the one before."""
    continuations, parents, path = list[int](), list[int](), [(0, -1)]  # path: where parts end, and their numbers
    for place, length in enumerate(lengths):
        while path[-1][0] > shared[place]:
            path.pop()
        for end in (*_cuts(shared, place), length):
            begin, parent = path[-1]
            if end > begin:
                path.append((end, len(continuations)))
                continuations.append(end - begin)
                parents.append(parent)
    return Family(prompt, tuple(continuations), tuple(parents) if max(parents, default=-1) >= 0 else ())


def _cuts(shared: Sequence[int], place: int) -> list[int]:
    """Where texts that come after one leave its own part, as numbers of its first tokens, in increasing order.

    Args:
        shared: The tokens that each text shares with the one before it; see `TreeOrder`.
        place: Place of the text among them. Its own part begins behind what it shares with the one before it.
    """
    found = list[int]()
    for common in shared[place + 1 :]:
        if common <= shared[place]:
            break
        if not found or common < found[-1]:
            found.append(common)
    return found[::-1]


def _num_common(one: Tokens, other: Tokens) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    place = int(differs.argmax()) if count else 0
    return place if count and differs[place] else count


def _tree(order: Sequence[int], common: Sequence[int]) -> _Node:
    """Build a tree from sorted texts and the numbers of tokens that neighbors share."""
    path = [_Node(0)]
    for text, following in zip(order, [*common, 0], strict=True):
        if following > path[-1].depth:
            path.append(_Node(following, [text]))
            continue
        path[-1].children.append(text)
        while path[-1].depth > following:
            done = path.pop()
            if path[-1].depth < following:
                path.append(_Node(following))
            path[-1].children.append(done)
    return path[0]


def _merge(root: _Node, least: int) -> None:
    """Give the texts of nodes with too few tokens of their own to the nodes above them."""
    waiting = [root]
    while waiting:
        node, kept = waiting.pop(), list[_Node | int]()
        rest = node.children[::-1]
        while rest:
            child = rest.pop()
            if isinstance(child, _Node) and child.depth - node.depth < least:
                rest += child.children[::-1]
            else:
                kept.append(child)
        node.children = kept
        waiting += [child for child in kept if isinstance(child, _Node)]


def _measure(root: _Node, lengths: Sequence[int]) -> None:
    """Count the tokens below each node, and put its children in order."""
    for node, above in reversed([*_nodes(root)]):

        def key(child: _Node | int, depth: int = node.depth) -> tuple[int, int]:
            return (-child.total, child.first) if isinstance(child, _Node) else (depth - lengths[child], child)

        node.children.sort(key=key)
        keys = [key(child) for child in node.children]
        node.total = node.depth - above - sum(total for total, _ in keys)
        node.first = min(first for _, first in keys) if keys else 0


def _nodes(root: _Node) -> Iterator[tuple[_Node, int]]:
    """All nodes with the depth of the ones above them, which come first."""
    waiting = [(root, 0)]
    while waiting:
        node, above = waiting.pop()
        yield node, above
        waiting += [(child, node.depth) for child in node.children if isinstance(child, _Node)]


def _depth_first(root: _Node) -> TreeOrder:
    found, common = TreeOrder([], []), 0
    path = [(root.depth, iter(root.children))]
    while path:
        depth, children = path[-1]
        child = next(children, None)
        if child is None:
            path.pop()
            continue
        common = min(common, depth)
        if isinstance(child, _Node):
            path.append((child.depth, iter(child.children)))
        else:
            found.texts.append(child)
            found.shared.append(common)
            common = depth
    return found
