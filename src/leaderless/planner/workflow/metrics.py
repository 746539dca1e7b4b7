"""The metrics of a run: their names and meanings, and which of them a recipe reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from leaderless.config import RecipeError, nearest
from leaderless.config.judges import JudgeOptions
from leaderless.config.rewards import CodeOptions, FormatOptions
from leaderless.observability.known_metrics import known_metric
from leaderless.planner.workflow.builtin_stages import spec_of
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.planner.workflow.stage_spec import names_for, tagged

if TYPE_CHECKING:
    from leaderless.config import Recipe
    from leaderless.planner.workflow.workflow import Node, Workflow


def metrics_of(recipe: Recipe, nodes: Sequence[Node], workflow: Workflow) -> list[str]:
    """Names of the metrics that a run reports, given the nodes that run."""
    names = ["time/step", "data/epoch", *(f"time/{node.name}" for node in nodes)]
    if isinstance(recipe.data.train, Mapping):
        names += [f"data/epoch/{name}" for name in recipe.data.train]
    for node in nodes:
        spec = spec_of(node)
        settings = spec.settings_of(recipe, node)
        names += [tagged(name, node) for name in names_for(settings, node, spec.metrics)]
        if "reward_valid" in spec.writes_of(settings, node, workflow):
            names.append(tagged("reward/failed_share", node))
    if workflow.repeated:
        names += ["sampling/rounds", "sampling/carried", "sampling/missing"]
    return [*dict.fromkeys([*names, *_evaluation_metrics(recipe)])]


def check_best_metric(recipe: Recipe, nodes: Sequence[Node], workflow: Workflow) -> None:
    """Refuse a `checkpoint.best_metric` that no step reports, or also steps that write no checkpoint."""
    name = recipe.checkpoint.best_metric
    if name is None:
        return
    reported, known = metrics_of(recipe, nodes, workflow), known_metric(name)
    if name in reported:
        _check_evaluated_steps(recipe, name)
        return
    related = [other for other in reported if other.partition("/")[0] == name.partition("/")[0]]
    hint = f"; it reports {', '.join(related)}" if related else ("" if known else nearest(name, reported))
    if known:
        needs = f": needs {known.needs}" if known.needs else ": no node of its workflow does"
        raise RecipeError.at("checkpoint.best_metric", f"'{name}' is not reported by this recipe{needs}{hint}")
    raise RecipeError.at(
        "checkpoint.best_metric",
        f"no metric is called '{name}'{hint}; a custom stage declares what it reports with @stage(metrics=[...])",
    )


def _check_evaluated_steps(recipe: Recipe, name: str) -> None:
    """The step with the best evaluation needs a checkpoint, so every evaluated step does."""
    evaluated, written = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    if name in _evaluation_metrics(recipe) and (written == 0 or evaluated % written):
        raise RecipeError.at(
            "checkpoint.every_steps",
            f"is {written}, so that not every step that reports '{name}' (evaluation.every_steps={evaluated}) writes a "
            f"checkpoint, and the best could be lost: set it to {evaluated}, or to a number that divides {evaluated}",
        )


def _evaluation_metrics(recipe: Recipe) -> list[str]:
    config, k = recipe.evaluation, recipe.evaluation.responses_per_prompt
    if not config.every_steps:
        return []
    if recipe.data.preferences is not None:
        own = ["accuracy"] * (recipe.data.preferences == "pairs")
        return [*(f"evaluation/{name}" for name in ("loss", "margin", *own)), "time/evaluate"]
    names = [f"evaluation/mean@{k}", "evaluation/failed", "time/evaluate"]
    names += PRODUCTS[recipe.product].evaluation_metrics
    names += [f"evaluation/pass@{j}" for j in pass_at_sizes(k)]
    options = recipe.reward.options()
    decides = [options.get(config.metric)] if config.metric else [*options.values()]
    if k > 1 and not all(isinstance(one, CodeOptions | FormatOptions | JudgeOptions) for one in decides):
        names.append(f"evaluation/maj@{k}")
    return [*names, *(["evaluation/not_applicable"] if config.metric else [])]


def pass_at_sizes(k: int) -> list[int]:
    """The j for which pass@j is reported with k responses to a prompt: powers of 2 and k itself, without 1."""
    return sorted({*(2**e for e in range(1, k.bit_length())), k} - {1})
