"""Whether the models that a node uses, or that score each other's samples, have the same tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner.model_size import model_file
from leaderless.planner.parts import PlannedNode


def check_vocabularies(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """Refuse nodes whose roles have different vocabularies, as far as files on this machine show.

    The roles of a node are those that it uses and those that sampled its rows: all work with the same token ids.

    Raises:
        RecipeError: Two models give some token different ids.
    """
    known: dict[str, dict[str, int] | None] = {}
    for node in nodes:
        used = [role for role, use in node.uses if use != "judge"]  # judges read text
        roles = list(dict.fromkeys([*used, *(node.node.agents if used else ())]))
        for first, second in combinations(roles, 2):
            mine, others = recipe.model_of(first), recipe.model_of(second)
            if mine is None or others is None or mine.path == others.path:
                continue
            for model in (mine, others):
                if model.path not in known:
                    known[model.path] = _vocabulary(model)
            token = _difference(known[mine.path], known[others.path])
            if token is not None:
                raise RecipeError.at(
                    f"models.{second}",
                    f"node '{node.name}' uses role '{first}' ({mine.path}) and role '{second}' ({others.path}), which "
                    f"have different vocabularies: they differ in the id of {token!r}; all roles of a node need one "
                    "tokenizer",
                )


def _vocabulary(model: ModelConfig) -> dict[str, int] | None:
    """The id of every token of a model's tokenizer; None where no file on this machine says it."""
    path = model_file(model, "tokenizer.json")
    if path is None:
        return None
    try:
        tokenizer = json.loads(Path(path).read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens", ())}
        if isinstance(vocabulary, list):
            return {str(token): place for place, (token, _) in enumerate(vocabulary)} | added
        return {str(token): int(place) for token, place in vocabulary.items()} | added
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _difference(mine: dict[str, int] | None, others: dict[str, int] | None) -> str | None:
    """A token that has different ids; None if there is none, or if that is not known."""
    if mine is None or others is None or mine == others:
        return None
    return min(token for token in mine.keys() | others.keys() if mine.get(token) != others.get(token))
