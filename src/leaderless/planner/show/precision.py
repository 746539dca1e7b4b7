"""How engines compute that do it in low precision or with drafts, as lines of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from leaderless.config import Recipe
from leaderless.config.low_precision import DRAFTS, formats_of, num_drafts
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import answering


def precision_lines(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Role and formats of each engine of low precision, the same of drafts, and how such samples are corrected."""
    lines = list[tuple[str, str]]()
    for one in plan.instances:
        if not (one.has_engine or one == answering(plan.instances, recipe.evaluation.role)):
            continue
        given = recipe.as_seen_by(one.role).rollout.external.given_arguments
        lines += [(one.role, f"{one.engine} has {found}") for found in formats_of(one.engine, given)]
        if count := num_drafts(one.engine, given):
            lines.append((one.role, f"{one.engine} drafts {count} tokens at a time ({DRAFTS})"))
    return [*dict.fromkeys([*lines, *_corrections(recipe, plan)])] if lines else []


def _corrections(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """The correction of each node that trains on samples of low precision."""
    for node in plan.nodes:
        seen, owner = node.settings_of(recipe), recipe.sections_of(node.node.role, node.node.agents).get("algorithm")
        written = (recipe.roles[owner].algorithm if owner else None) or recipe.algorithm
        agents = [recipe.as_seen_by(agent).rollout for agent in node.node.agents]
        if node.spec.role_use != "train" or not any(one.low_precision for one in agents):
            continue
        chosen, key = seen.algorithm.correction, "algorithm.correction"
        if chosen.has_weights:
            how = f"{chosen.type} at {chosen.highest:g}" if chosen.type == "truncate" else chosen.type
            by = "the default for low precision" if written.correction.type == "auto" else key
            yield node.name, f"corrects samples by {how} ({by})"
        else:
            yield node.name, f"does not correct samples ({key}.type: {chosen.type}, {seen.algorithm.policy_loss.type})"
