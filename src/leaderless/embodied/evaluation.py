"""Success of a policy that moves a body in held-out tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from leaderless.config import Recipe
from leaderless.data.batch import Batch, make_sample_ids
from leaderless.embodied.rollout.policy_rollout import BodyEngine
from leaderless.embodied.stages.film_strips import describe_episode
from leaderless.embodied.stages.rollout import body_tasks, graded_episode
from leaderless.observability.clock import Clock
from leaderless.rewards.pool import Graded
from leaderless.stages.context import ModelRole
from leaderless.stages.recorded_samples import Record


def evaluate_bodies(
    recipe: Recipe, model: ModelRole, batch: Batch, seed: int, progress: Callable[[float], None], record: Record | None
) -> list[Graded]:
    """Play the episodes of held-out tasks, task after task, and grade them.

    Args:
        recipe: The recipe, as seen by the role that acts.
        model: Policy that acts.
        batch: The tasks.
        seed: Seed of all noise.
        progress: Function that receives the finished fraction.
        record: Function that receives the episodes to keep for people.
    """
    config = recipe.evaluation
    k = config.responses_per_prompt
    ids = make_sample_ids(batch.ids.repeat_interleave(k), torch.arange(k).repeat(len(batch)))
    tasks = body_tasks(batch, ids, [config] * k, seed)
    num_shown = k * recipe.run.recorded_prompts if record is not None else 0
    # Held-out episodes may be many: only those that are shown keep their frames.
    tasks = [replace(task, keeps_frames=place < num_shown) for place, task in enumerate(tasks)]
    with model.generating() as engine:
        assert isinstance(engine, BodyEngine)
        episodes = engine.play(
            tasks, seed=seed, temperature=config.temperature or 1.0, progress=progress, clock=Clock()
        )
        spaces = engine.spaces
    graded = [graded_episode(episode) for episode in episodes]
    if record is not None:
        shown = list(zip(ids.tolist(), episodes, graded, strict=True))[:num_shown]
        places = zip(shown, batch.ids.repeat_interleave(k).tolist(), strict=False)
        record(
            [
                {"sample_id": number, "group_id": group} | describe_episode(episode, one, spaces)
                for (number, episode, one), group in places
            ]
        )
    return graded
