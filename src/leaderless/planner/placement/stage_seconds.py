"""A profile: measured seconds of each stage, as a function of what it works on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from leaderless.base.section import Section
from leaderless.config import Recipe, RecipeError

SETTINGS = (
    "workflow",
    *(f"rollout.{name}" for name in ("engine", "max_response_tokens", "max_sequences")),
    "training.backend",
    *(f"batch.{name}" for name in ("responses_per_prompt", "updates_per_step")),
)
"""Settings on which measured seconds depend, besides models and the environment."""


class Point(NamedTuple):
    """Work of a shard in one run of a node, and the seconds that it took.

    `lengths` are the tokens of each response in order, if the node has sampled them, and `waits` the seconds for which
    its episode has waited for the environment, if it is one of an episode.
    """

    rows: float
    tokens: float
    longest: float
    seconds: float
    lengths: Sequence[int] = ()
    waits: Sequence[float] = ()


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
    place_s: float = Field(default=0.0, ge=0)
    """Seconds per token of the place that has the most, if responses take turns at `places`."""
    places: int = Field(default=0, ge=0)
    """Responses that are sampled at a time; the next one begins as soon as one has ended."""
    pause_tokens: float = Field(default=0.0, ge=0)
    """Time for which a response keeps its place without sampling, as when an environment answers, in tokens."""
    waits: bool = False
    """Whether the longest row belongs to the episode that ends last: it waits for its environment, too."""
    error: float = Field(default=0.0, ge=0)
    """Mean relative error of the law over the measurements that it was made of."""

    def of(self, rows: float, tokens: float, longest: float, fullest: float = 0.0) -> float:
        """Seconds of a shard with these rows and tokens, and these tokens of the place that has the most."""
        linear = self.fixed_s + self.row_s * rows + self.token_s * tokens + self.longest_s * longest
        return linear + self.place_s * fullest


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
    waits: tuple[float, ...] = ()
    """Seconds for which the episodes of the same responses have waited for their environment and tools, if they are
    episodes."""
    cluster: str = ""
    """Name of the described machines by whose cost model the seconds were computed; empty if they were measured."""

    def digest(self) -> str:
        """Fingerprint of the content, which is part of the plan's."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def settings_of(recipe: Recipe) -> dict[str, str]:
    """The settings of a recipe that a profile's seconds depend on."""
    found = {f"models.{role}": model.path for role, model in recipe.models.items()}
    found |= {name: str(attrgetter(name)(recipe)) for name in SETTINGS}
    if recipe.environment is not None:
        found["environment"] = recipe.environment.model_dump_json()
    return found


def read_profile(path: Path) -> Profile:
    """The profile in a file; a RecipeError if there is none, or it is no profile."""
    remedy = (
        "run `leaderless profile RECIPE --output FILE` on these machines; or describe them, by --cluster FILE or "
        "placement.cluster, as recipes/clusters/h100.yaml does; or write `layout` out"
    )
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
    """Refuse a profile of a recipe in which a setting that seconds depend on has another value."""
    now, then = settings_of(recipe), profile.settings
    key = next((key for key in sorted({*now, *then}) if now.get(key) != then.get(key)), None)
    if key is not None:
        path = recipe.placement.profile if recipe.placement else "profile.json"
        raise RecipeError.at(
            "placement.profile",
            f"{path} was measured with {key}={then.get(key)}, but the recipe has {now.get(key)}: run `leaderless "
            "profile` with this recipe",
        )
