"""The rollout in an environment: each rank plays its own episodes, whose conversations become samples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from leaderless.config import Recipe
from leaderless.data.batch import Batch
from leaderless.distributed.errors import memory_explained
from leaderless.environments.registry import agents_of
from leaderless.planner import PlannedNode
from leaderless.planner.workflow.columns import EXPERTS
from leaderless.planner.workflow.reward_stages import ENVIRONMENT
from leaderless.stages.context import StageContext
from leaderless.stages.earlier_turns import EarlierTurns, earlier_episodes
from leaderless.stages.episode_samples import Play, Played
from leaderless.stages.play_episodes import play_tasks
from leaderless.stages.rollout import TOO_MUCH, distributions_of, first_sibling, num_siblings


def rollout(batch: Batch, context: StageContext) -> Batch:
    """Play `batch.responses_per_prompt` episodes of each task, and one more greedily if the node wants that."""
    return _play(batch, context, play_of(context.node, context.recipe))


def play_on(batch: Batch, context: StageContext) -> Batch:
    """Continue the episodes of other roles, up to where an agent of yet another role is to act.

    The samples of all agents come out, with what the environment has answered since.
    """
    config, recipe = context.recipe.environment, context.recipe
    assert config is not None
    assert batch.prompts is not None
    play = Play(distributions_of(recipe), 0, num_siblings(context.node.node, recipe), recipe.seed)
    places = recipe.batch.responses_per_prompt + 1
    return _play(batch.prompts, context, play, earlier_episodes(batch, agents_of(config), places))


def play_of(node: PlannedNode, recipe: Recipe) -> Play:
    """The episodes that a node plays of each task; the recipe is as the node sees it."""
    distributions = distributions_of(recipe, has_greedy="is_greedy" in node.writes)
    return Play(distributions, first_sibling(node.node, recipe), num_siblings(node.node, recipe), recipe.seed)


def _play(batch: Batch, context: StageContext, play: Play, earlier: Sequence[EarlierTurns] | None = None) -> Batch:
    """Play an episode from each distribution for each task, or continue earlier ones."""
    recipe = context.recipe
    data = [recipe.data.train_set_of(row) for row in batch.objects("rows") if isinstance(row, Mapping)]
    with memory_explained(TOO_MUCH), context.role.generating() as engine:
        begin = time.perf_counter()
        played = play_tasks(
            engine,
            play,
            batch,
            data,
            recipe,
            context.tokenizer,
            context.progress,
            role=context.node.node.role or "",
            earlier=earlier,
            clock=context.clock,
        )
        seconds = time.perf_counter() - begin
    return samples_of(played, context, seconds)


def samples_of(played: Played, context: StageContext, seconds: float) -> Batch:
    """The samples of episodes that took some seconds; they are reported and written down, too."""
    config, own = context.recipe.environment, context.node.node.role or ""
    played.report(context.metrics, context.node.layout.dp, seconds)
    if context.episodes is not None:
        context.episodes.write("step", context.step, "played", played.journal)
    error = played.first_error()
    if error is not None:
        context.run_directory.note_reward_error(context.step, context.process_group.rank, ENVIRONMENT, error)
    samples = played.samples()
    context.facts["waits"] = played.waits()
    roles = [own] if config is None else [config.agents.get(agent, own) for agent in agents_of(config)]
    numbers = torch.tensor([context.agents.index(role) if role in context.agents else 0 for role in roles])
    own_experts = {EXPERTS: played.experts()} if context.recipe.algorithm.replay_experts else {}
    return samples.with_columns(own_experts, agent=numbers[samples.dense("actor")])
