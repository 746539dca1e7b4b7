"""Bodies: the environment in which a policy moves, and how its episodes become samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from leaderless.base.section import ShorthandSection

Grain = Literal["token", "action", "chunk"]
"""Unit with its own log-probability: each number of an action, each action, or all actions of a decision."""


class PolicyConfig(ShorthandSection):
    """A model that moves a body, or that values what it sees."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Kind of the model: a built-in one, such as `mlp`, `cnn` or `film`, or a class `package.module:Class`."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor, such as sizes."""


class BodyConfig(ShorthandSection):
    """The environment of a body. A row of the dataset is a task, and a response an episode.

    The policy decides on several steps at once, a chunk of actions. What its decisions are made of takes the place of
    tokens.
    """

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Environment: a built-in one, such as `table`, or a class `package.module:Class` derived from `VectorEnvironment`;
    see [Bodies](../guides/bodies.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor."""
    num_environments: int = Field(default=64, ge=1)
    """Episodes that one rank plays at the same time."""
    processes: int = Field(default=0, ge=0)
    """Processes next to each rank that step its environments, which may crash or hang without harm, and step while the
    rank decides; 0 steps them in the rank itself."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a reset or a decision's steps may take in a process; then its episodes fail."""
    max_steps: int = Field(default=256, ge=1)
    """Steps after which an episode is truncated, if the environment does not end it before."""
    log_prob: Grain = "token"
    """Unit with its own log-probability and advantage: each number of an action, each action (one step), or all
    actions of a decision together."""
    demonstrations: str | None = None
    """Folder of demonstrations, for workflows that imitate them."""
    encoder: str = Field(default="convolution", min_length=1)
    """Source of vectors of episodes, for workflows that compare them, such as `srpo`: `convolution`, a small network
    with fixed random weights, or the folder of a V-JEPA 2 of transformers."""
    encoded_frames: int = Field(default=16, ge=2)
    """Frames of an episode that it looks at, spread evenly."""
