"""What judges a run asks, as far as a plan knows it."""

from __future__ import annotations

from leaderless.config import Recipe
from leaderless.config.judges import JudgeOptions
from leaderless.planner.plan import Plan


def judge_lines(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Each judge that the plan asks: its name, its model and address, and the most that it is asked."""
    node = next((node for node in plan.nodes if node.node.run == "reward"), None)
    if node is None:
        return []
    settings, num_ranks = node.settings_of(recipe), node.layout.dp
    return [(name, _line(settings, options, num_ranks)) for name, options in settings.reward.judges().items()]


def _line(recipe: Recipe, options: JudgeOptions, num_ranks: int) -> str:
    at_a_time = options.max_requests * num_ranks
    return f"{options.model} at {options.url}: {_asked(recipe, options)}, at most {at_a_time:,} requests at a time"


def _asked(recipe: Recipe, options: JudgeOptions) -> str:
    """The most questions of a step, without those that are repeated; rows of other sources and equal ones are fewer."""
    groups, siblings = recipe.batch.prompts_per_step, recipe.batch.responses_per_prompt
    if options.pairwise is None:
        return f"{groups * siblings:,} questions a step"
    pairs = siblings * min(options.pairwise.opponents, (siblings - 1) / 2)
    return f"{int(2 * groups * pairs):,} questions a step"
