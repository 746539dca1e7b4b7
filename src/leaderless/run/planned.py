"""A recipe together with the plan of its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from leaderless.config import LoadedRecipe, Recipe, RecipeError, nearest
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.rollout.choose import choose_engine
from leaderless.workflow import Workflow, load_recipe, resolve_workflow
from leaderless.workflow.evaluation import evaluation_workflow


@dataclass(frozen=True)
class Planned:
    """A recipe and what the planner made of it."""

    loaded: LoadedRecipe
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        """The settings."""
        return self.loaded.recipe


@contextmanager
def located(loaded: LoadedRecipe) -> Iterator[None]:
    """Errors about a recipe name the file and line of the setting.

    Args:
        loaded: The recipe.
    """
    try:
        yield
    except RecipeError as error:
        raise loaded.locate(error) from None  # the error says all that a user needs


def recipe_path(target: Path) -> Path:
    """The recipe that a path means.

    Args:
        target: YAML file, or the folder of a run.
    """
    return target / "config.yaml" if target.is_dir() else target


def plan_recipe(recipe: Path, overrides: Sequence[str], num_workers: int) -> Planned:
    """Read a recipe and plan its run.

    Args:
        recipe: YAML file, or the folder of a run.
        overrides: Settings as `section.key=value`.
        num_workers: Number of workers.

    Raises:
        RecipeError: Something in the recipe is wrong; every problem has its place.
    """
    return plan_training(load_recipe(recipe_path(recipe), overrides), num_workers)


def plan_training(loaded: LoadedRecipe, num_workers: int) -> Planned:
    """Plan a run.

    Args:
        loaded: Its recipe.
        num_workers: Number of workers.

    Raises:
        RecipeError: The recipe does not work with so many workers; every problem has its place.
    """
    with located(loaded):
        return _plan(loaded, resolve_workflow(loaded.recipe.workflow), num_workers)


def plan_evaluation(loaded: LoadedRecipe, role: str, num_workers: int) -> Planned:
    """Plan an evaluation, in which one role answers on all workers, whatever the recipe says about training.

    Args:
        loaded: The recipe.
        role: Role that answers.
        num_workers: Number of workers.

    Raises:
        RecipeError: The recipe has no held-out prompts, no reward or no such role.
    """
    recipe = loaded.recipe
    model = recipe.model_of(role)
    with located(loaded):
        if recipe.data.evaluation is None:
            raise RecipeError.at("data.evaluation", "must name the held-out prompts")
        if not recipe.reward.options():
            raise RecipeError.at("reward", "must name a reward, to tell which responses are correct")
        if model is None:
            raise RecipeError.at("models", f"has no model for the role '{role}'{nearest(role, recipe.models)}")
        batch = recipe.batch.model_copy(update={"prompts_per_step": max(recipe.batch.prompts_per_step, num_workers)})
        checkpoint = recipe.checkpoint.model_copy(update={"best_metric": None})
        update = {"models": {role: model}, "layout": {}, "batch": batch, "checkpoint": checkpoint}
        recipe = recipe.model_copy(update=update)
        return _plan(LoadedRecipe(recipe, loaded.source), evaluation_workflow(role), num_workers)


def _plan(loaded: LoadedRecipe, workflow: Workflow, num_workers: int) -> Planned:
    cluster = Cluster(num_workers, choose_engine(loaded.recipe.rollout))
    return Planned(loaded, make_plan(loaded.recipe, workflow, cluster))
