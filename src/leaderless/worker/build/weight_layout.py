"""How the weights of a role are divided among its ranks, and in which type they are sent to engines."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from leaderless.config import Recipe
from leaderless.distributed.weights.blocks import Placement, everything, shard_rows
from leaderless.distributed.weights.pipeline_parallel import stage_rows
from leaderless.planner.train_backends import backend_of


def placement_of(recipe: Recipe, names: Iterable[str]) -> Placement:
    """How the back end of a role divides its weights, which have these names."""
    backend = backend_of(recipe.training.backend)
    if not backend.shards_weights or recipe.algorithm.sac is not None:
        return everything
    return stage_rows(names) if backend.shards_along_axes else shard_rows


def type_of_engines(role: str, recipe: Recipe) -> torch.dtype:
    """The type of weights that are sent to ranks that only generate."""
    config = recipe.model_of(role)
    assert config is not None, "checked by the planner"
    return getattr(torch, config.compute_dtype) if recipe.body is None else torch.float32
