"""Trackers that the numbers of a run are sent to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, JsonValue

from leaderless.base.section import ShorthandSection


class LoggerConfig(ShorthandSection):
    """A tracker that gets the numbers, the recipe, samples and the report of a run; a bare name is its type."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """`tensorboard`, `wandb`, `mlflow` or `trackio`; or a custom logger as `package.module:Class`. See
    [Loggers](../guides/loggers.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor, such as `project`."""
    tables_every_steps: int = Field(default=10, ge=0)
    """Steps between tables of recorded samples and of episodes, from step 1 on; 0 for none. Tables of evaluations are
    sent as well, unless it is 0."""
    finish_s: float = Field(default=60.0, gt=0)
    """Seconds after the last step in which to send what is left; what does not get through by then stays in the folder
    of the run."""
