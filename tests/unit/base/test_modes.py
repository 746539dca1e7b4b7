"""How often the source asks which of the five products a run is: text, episodes, continuous, online or bodies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "leaderless"
LIMIT = 58
"""Most places that may ask. Each product has a rollout of its own, which the table of stages chooses: use a table."""
SECTIONS = {"environment", "online", "body"}
"""Sections of a recipe that only one product has."""
KINDS = {"product", "has_episodes", "has_tasks", "is_continuous", "_is_continuous", "generated", "desk"}
"""Names of what a run, a loop or a rank is or has only with some products."""


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """All expressions of which only the truth matters, and all comparisons."""
    for node in _without_assertions(tree):
        match node:
            case ast.If() | ast.IfExp() | ast.While():
                yield node.test
            case ast.comprehension():
                yield from node.ifs
            case ast.Match():
                yield node.subject
            case ast.BoolOp() | ast.Compare():
                yield node
            case ast.UnaryOp(op=ast.Not()):
                yield node
            case ast.BinOp(op=ast.Mult(), left=ast.List()):  # [column] * is_wanted
                yield node.right


def _without_assertions(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it that are no assertion: one decides nothing."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Assert):
            yield from _without_assertions(child)


def asks(condition: ast.expr, *, is_recipe: bool) -> bool:
    """Whether a condition asks for the product; `is_recipe` if it is one of the recipe itself."""
    for node in ast.walk(condition):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr in KINDS or (node.attr in SECTIONS and (is_recipe or owner.endswith(("recipe", "own")))):
                return True
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(isinstance(side, ast.Constant) and side.value == "continuous" for side in sides):
                return True
    return False


def questions(source: str, *, is_recipe: bool = False) -> list[int]:
    """Lines in which some source asks for the product, each once."""
    found = (one for one in conditions(ast.parse(source)) if asks(one, is_recipe=is_recipe))
    return sorted({one.lineno for one in found})


def test_the_product_of_a_run_is_asked_for_in_few_places() -> None:
    places = [
        f"{file.relative_to(SOURCE)}:{line}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line in questions(file.read_text(encoding="utf-8"), is_recipe=file.parts[-2:] == ("config", "recipe.py"))
    ]
    assert len(places) <= LIMIT, "\n".join(places)


def test_each_way_to_ask_is_counted() -> None:
    asked = """
if recipe.environment is not None: pass
x = 1 if self._recipe.online else 2
y = [one for one in rows if context.recipe.has_episodes]
z = columns + ["turns"] * recipe.has_tasks
while not loop.is_continuous: pass
a = recipe.body and recipe.seed
match recipe.product:
    case "text": pass
b = any(channel.mode == "continuous" for channel in channels)
"""
    assert questions(asked) == [2, 3, 4, 5, 6, 7, 8, 10]
    told = """
table[recipe.product].check(recipe)
if response.body: pass
config = recipe.environment
assert recipe.online is not None
"""
    assert questions(told) == []
