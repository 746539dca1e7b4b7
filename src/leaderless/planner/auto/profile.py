"""A profile: measured seconds of each stage, as a function of what it works on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from leaderless.config import Recipe, RecipeError
from leaderless.config.base import Section

LEAST_S = 1e-3
"""Seconds below which the error of a measurement counts as if it took as long."""
ENOUGH, NOTHING = 1.02, 1e-6
"""A law of more terms is taken if the error of the one of fewer is this many times its own, and larger by as much."""


class Point(NamedTuple):
    """What a shard worked on in one run of a node, and the seconds that it took."""

    rows: float
    tokens: float
    longest: float
    seconds: float


class StageSeconds(Section):
    """Seconds of one run of a node on a shard: the sum of the terms. Tokens are those that the policy sampled."""

    fixed_s: float = Field(default=0.0, ge=0)
    """Seconds whatever it works on."""
    row_s: float = Field(default=0.0, ge=0)
    """Seconds per row."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds per token."""
    longest_s: float = Field(default=0.0, ge=0)
    """Seconds per token of the longest row."""
    error: float = Field(default=0.0, ge=0)
    """Mean relative error of the law over the measurements that it was made of."""

    def of(self, rows: float, tokens: float, longest: float) -> float:
        """Seconds of a shard with these rows and tokens."""
        return self.fixed_s + self.row_s * rows + self.token_s * tokens + self.longest_s * longest


class MachineIdentity(Section):
    """The machines of a profile."""

    processor: str
    """Model of the processor."""
    accelerator: str | None = None
    """Model of the accelerator, if ranks have one."""
    memory_gib: float = Field(gt=0)
    """Memory that each rank may use: of its accelerator, or its share of the host's."""


class Profile(Section):
    """Measured seconds of a recipe's stages, and what they hold for."""

    machine: MachineIdentity
    """Machines on which they were measured."""
    settings: Mapping[str, str]
    """Settings of the recipe that they depend on, as text."""
    world_size: int = Field(ge=1)
    """Number of workers that measured."""
    stages: Mapping[str, StageSeconds]
    """Seconds of each node."""
    reshard_s: float = Field(default=0.0, ge=0)
    """Seconds in which rows go to other ranks, for each transfer."""
    sync_s: float = Field(default=0.0, ge=0)
    """Seconds in which new weights go to other ranks."""
    overhead_s: float = Field(default=0.0, ge=0)
    """Seconds of a step outside of all nodes."""
    lengths: tuple[int, ...] = ()
    """Tokens of sampled responses, those to one prompt next to each other."""

    def digest(self) -> str:
        """Fingerprint of the content, which is part of the plan's."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def settings_of(recipe: Recipe) -> dict[str, str]:
    """The settings of a recipe that a profile's seconds depend on."""
    found = {f"models.{role}": model.path for role, model in recipe.models.items()}
    found["workflow"] = recipe.workflow
    found["rollout.engine"] = recipe.rollout.engine
    found["rollout.max_response_tokens"] = str(recipe.rollout.max_response_tokens)
    found["rollout.max_sequences"] = str(recipe.rollout.max_sequences)
    found["training.backend"] = str(recipe.training.backend)
    found["batch.responses_per_prompt"] = str(recipe.batch.responses_per_prompt)
    found["batch.updates_per_step"] = str(recipe.batch.updates_per_step)
    if recipe.environment is not None:
        found["environment"] = recipe.environment.model_dump_json()
    return found


def read_profile(path: Path) -> Profile:
    """The profile in a file.

    Raises:
        RecipeError: There is no such file, or it is no profile.
    """
    remedy = "run `leaderless profile RECIPE --output FILE` on these machines, or write `layout` out"
    try:
        return Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError.at(
            "placement.profile", f"{path} cannot be read ({error.strerror}), and layouts are chosen by it: {remedy}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its text"
        raise RecipeError.at(
            "placement.profile", f"{path} is no profile ({where}: {first['msg']}): {remedy}"
        ) from error


def check_profile(profile: Profile, recipe: Recipe) -> None:
    """Refuse a profile of another recipe.

    Raises:
        RecipeError: A setting that seconds depend on has another value in the profile.
    """
    now, then = settings_of(recipe), profile.settings
    key = next((key for key in sorted({*now, *then}) if now.get(key) != then.get(key)), None)
    if key is not None:
        path = recipe.placement.profile if recipe.placement else "profile.json"
        raise RecipeError.at(
            "placement.profile",
            f"{path} was measured with {key}={then.get(key)}, but the recipe has {now.get(key)}: run `leaderless "
            "profile` with this recipe",
        )


def fit_seconds(points: list[Point]) -> StageSeconds:
    """The law with non-negative terms that has the least relative error over measured points.

    Of laws that are about as good, the one with the fewest terms is taken: seconds of a stage that was measured at one
    size only are then in proportion to it.
    """
    import numpy as np  # commands that only say something do without it

    values = np.array(points, dtype=np.float64)
    features = np.column_stack([np.ones(len(values)), values[:, :3]])
    weights = 1 / np.maximum(values[:, 3], LEAST_S)
    target = values[:, 3] * weights
    best, least = np.zeros(4), float("inf")
    # Terms in the order in which they are preferred where several explain the points.
    for chosen in chain.from_iterable(combinations((2, 1, 0, 3), size) for size in (1, 2, 3, 4)):
        columns = features[:, list(chosen)] * weights[:, None]
        solution = np.linalg.lstsq(columns, target, rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(np.square(columns @ solution - target).mean()) ** 0.5
        if error * ENOUGH + NOTHING < least:
            least, best = error, np.zeros(4)
            best[list(chosen)] = solution
    found = features @ best
    error = float(np.abs((found - values[:, 3]) * weights).mean())
    fixed_s, row_s, token_s, longest_s = best.tolist()
    return StageSeconds(fixed_s=fixed_s, row_s=row_s, token_s=token_s, longest_s=longest_s, error=error)
