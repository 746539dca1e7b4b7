"""The teachers of a run: where they are asked, and what cannot teach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from leaderless.algorithms.settings import TeacherContextConfig
from leaderless.config import Recipe, RecipeError, nearest
from leaderless.planner.workflow import Workflow, spec_of
from leaderless.planner.workflow.distillation_stages import teacher_name
from leaderless.planner.workflow.training_stages import check_pass_fits

KEY = "algorithm.distillation"


def teachers_of(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    """The teachers of a recipe, by the names under which stages have them, with their roles."""
    config = recipe.algorithm.distillation
    if config.server is not None:
        return ()
    roles = dict.fromkeys(config.teachers.values()) if config.teachers else (config.teacher,)
    return tuple((teacher_name(role), role) for role in roles)


def with_teachers(recipe: Recipe, workflow: Workflow) -> Workflow:
    """The workflow with the teachers of a recipe, at each node that asks them or learns from them itself."""
    teachers = teachers_of(recipe)
    nodes = (
        replace(node, teachers=teachers) if spec_of(node).asks_teachers(recipe) else node for node in workflow.nodes
    )
    return replace(workflow, nodes=tuple(nodes))


def check_teachers(recipe: Recipe, workflow: Workflow) -> None:
    """Refuse teachers where nobody learns from them, and those that are the student itself."""
    config = recipe.algorithm.distillation
    if not any(node.run == "distill" for node in workflow.nodes):
        fields = type(config).model_fields.items()
        changed = next((name for name, field in fields if getattr(config, name) != field.default), None)
        if changed is not None:
            raise RecipeError.at(
                f"{KEY}.{changed}",
                f"is {getattr(config, changed)}, but no node of the workflow '{workflow.name}' compares distributions: "
                "use a workflow that has one, as gkd, or leave it out",
            )
        return
    trained = {node.role for node in workflow.nodes if spec_of(node).role_use == "train"}
    _check_sources(recipe)
    for _, role in teachers_of(recipe):
        # With a context, the reference may be the student before its first update.
        if role not in recipe.models and not (config.context and role == "reference"):
            raise RecipeError.at(
                "models",
                f"must name models.{role}, the teacher whose distributions are imitated"
                f"{nearest(role, recipe.models) if role != 'reference' else ''}",
            )
        if role in trained and config.context is None:
            raise RecipeError.at(
                f"{KEY}.teacher",
                f"is '{role}', which is trained: a student that imitates itself learns nothing; name the role of "
                "another model, as reference, or give the teacher a context",
            )
    if config.align == "text" and (recipe.has_images or recipe.task_section):
        raise RecipeError.at(
            f"{KEY}.align",
            f"is text, for which the teacher's prompts are made of rows, but here "
            f"{'they have images' if recipe.has_images else 'episodes write them'}: use a teacher with the student's "
            "tokenizer, and leave it out",
        )
    if config.context is not None:
        _check_context(recipe, config.context)


def _check_sources(recipe: Recipe) -> None:
    """Refuse teachers of sources that no row has, and datasets of a mixture without a teacher, as far as known."""
    teachers, data = recipe.algorithm.distillation.teachers, recipe.data
    if not teachers:
        return
    sets, is_mixture = data.train_sets(), isinstance(data.train, Mapping)
    if any(one.source for one in sets.values()):
        return  # only rows know their sources
    if not is_mixture:
        raise RecipeError.at(
            f"{KEY}.teachers",
            f"are given for the sources {', '.join(teachers)}, but rows have no source: name its column in "
            "data.train.source, or make data.train a mixture of named datasets",
        )
    names = [key.removeprefix("data.train.") for key in sets]
    for name in names:
        if name not in teachers:
            raise RecipeError.at(
                f"{KEY}.teachers",
                f"has no teacher for the dataset '{name}'{nearest(name, teachers)}: name its role, or leave the "
                f"dataset out (teachers: {', '.join(teachers)})",
            )
    for name in teachers:
        if name not in names:
            raise RecipeError.at(f"{KEY}.teachers.{name}", f"is no dataset of data.train{nearest(name, names)}")


def _check_context(recipe: Recipe, context: TeacherContextConfig) -> None:
    """Refuse a context where prompts are not text of the dataset, and prompts that no pass takes."""
    if recipe.has_images or recipe.task_section:
        raise RecipeError.at(
            f"{KEY}.context",
            f"makes prompts of text, but here {'they have images' if recipe.has_images else 'episodes write them'}: "
            "leave it out",
        )
    longest = context.max_prompt_tokens + recipe.longest_response()
    check_pass_fits(
        recipe, longest, f"but the teacher may read {longest} tokens ({KEY}.context.max_prompt_tokens + a response)"
    )
