"""The place at which a run lets others ask its policy while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from leaderless.base.named_functions import load_own
from leaderless.config import Recipe
from leaderless.data.prompts.encode import Tokenizer
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Plan
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.stages.context import Clients


class Entrance(Protocol):
    """An address that is reserved, or the knowledge of other ranks' addresses."""

    def open(self, recipe: Recipe, tokenizer: Tokenizer) -> Clients | None:
        """Let clients in; None on ranks that they do not ask."""

    def say(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        """Say where clients ask, and write it into the folder of the run."""


def entrance_of(recipe: Recipe, plan: Plan, rank: int) -> Entrance | None:
    """The entrance of a rank; None if the run has no clients.

    Raises:
        RecipeError: The address cannot be had.
    """
    if not (name := PRODUCTS[recipe.product].clients):
        return None
    return cast("Callable[[Recipe, Plan, int], Entrance]", load_own(name))(recipe, plan, rank)
