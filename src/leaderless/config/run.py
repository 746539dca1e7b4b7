"""How a run behaves: where it writes, how long it waits, what it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.config.base import Section


class CheckpointConfig(Section):
    """When the state of training is written."""

    every_steps: int = Field(default=0, ge=0)
    """Write a checkpoint after every so many steps; 0 leaves it to the clock. One is always written at the end."""
    every_minutes: float = Field(default=10.0, ge=0)
    """Write a checkpoint after the first step that ends so many minutes after the last one; 0 turns the clock off."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory; else training waits until all is written."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Checkpoints of steps that this number divides are kept as well; 0 keeps none for that reason."""
    best_metric: str | None = None
    """The checkpoint whose step has the best value of this metric is kept as well, such as `evaluation/mean@1`; see
    [Metrics](metrics.md)."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of `best_metric` is the best."""


class RunConfig(Section):
    """Where a run writes, how long it waits and what it shows."""

    directory: str = "runs"
    """The run writes into the folder of its name under this one."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds a collective or a transfer may take before it fails with an error that names it."""
    stall_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds in which no rank has moved after which it is a stall: the stacks of all ranks are written down and the
    workers are started anew; half of `timeout_s` if that is less, as others wait no longer for a rank that hangs."""
    grace_s: float = Field(default=60.0, gt=0)
    """Seconds to finish the step and write a checkpoint after a signal to stop; then the step is abandoned."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that workers started by `leaderless train` are started again after a failure; a new checkpoint gives the
    count back."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What happens, before anything is loaded, to a run that by the plan's estimate does not fit into the memory of a
    rank even with passes of one sample: it is refused, or starts with a warning. One that may only just fit starts with
    a warning in any case."""
    reward_processes: int = Field(default=1, ge=0)
    """Processes next to each worker that compute rewards. With 0, the worker computes them itself, for debuggers and
    notebooks: then time limits are not enforced, and a reward that crashes ends the worker."""
    recorded_prompts: int = Field(default=4, ge=0)
    """Prompts per step and recording rank whose samples are kept for the report; 0 prunes the recording node."""
    tensorboard: bool = True
    """Write TensorBoard events beside `metrics.jsonl`."""
    trace_steps: int = Field(default=20, ge=0)
    """Steps, from the first, of which each rank writes a Chrome trace; 0 writes none."""
