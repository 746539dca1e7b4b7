"""Whether the models of a run take the images of its prompts alike, found before any of them is loaded."""

from __future__ import annotations

from itertools import product

from leaderless.config import Recipe, RecipeError
from leaderless.models.decoder import load_model_config
from leaderless.models.loading.support import sees_images
from leaderless.models.vision.image_readers import FamilyImageReader, open_reader
from leaderless.planner import Plan, answering
from leaderless.planner.checks.model_files import check_scorer, scorers_of

_SIDES = (20, 56, 224, 333, 640, 1000, 2240, 6000)
"""Widths and heights in pixels of the images with which readers are compared."""


def check_readers(recipe: Recipe, plan: Plan) -> None:
    """Refuse models that would see no images, or would give them other tokens than the prompts have.

    Prompts are written once, for the model that answers; all other models but judges read the same tokens.

    Args:
        recipe: The recipe.
        plan: Its plan.

    Raises:
        RecipeError: A reward model reads text alone, or a model gives some image another number of tokens, or another
            token.
    """
    if not recipe.has_images:
        return
    scorers, first = scorers_of(plan.nodes), answering(plan.instances).role
    readers: dict[str, FamilyImageReader] = {}
    # Judges are asked in texts of their own.
    for role in dict.fromkeys((first, *(instance.role for instance in plan.instances if not instance.is_judge))):
        config = recipe.model_of(role)
        assert config is not None, "checked by the planner"
        described = load_model_config(config, role)
        if role in scorers:
            check_scorer(recipe, role, described.model_type)
        if sees_images(described):
            readers[role] = open_reader(config, role)
    for role, reader in readers.items():
        if first in readers and (problem := _difference(readers[first], reader)):
            raise RecipeError.at(
                f"models.{role}",
                f"{problem} for '{first}': give both models the same settings of images (preprocessor_config.json)",
            )


def _difference(first: FamilyImageReader, other: FamilyImageReader) -> str:
    """How another model takes images otherwise than the first one; empty if it does not."""
    if other.token != first.token:
        return f"images are token {other.token} for this model, but {first.token}"
    for height, width in product(_SIDES, _SIDES):
        wanted, found = _grid(first, height, width), _grid(other, height, width)
        if found != wanted:
            shapes = (f"{one[0]} x {one[1]} tokens" if one else "refused" for one in (found, wanted))
            return f"an image of {width} x {height} pixels is {' for this model, but '.join(shapes)}"
    return ""


def _grid(reader: FamilyImageReader, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of tokens of an image; None if the model does not take its shape."""
    try:
        return reader.grid(height, width)
    except ValueError:
        return None
