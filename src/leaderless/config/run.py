"""How a run behaves: where it writes, how long it waits, what it keeps."""

from __future__ import annotations

from pydantic import Field

from leaderless.config.base import Section


class CheckpointConfig(Section):
    """When the state of training is written."""

    every_steps: int = Field(default=0, ge=0)
    """Write a checkpoint after every so many steps; 0 writes only the last one and the one on Ctrl-C."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""


class RunConfig(Section):
    """Where a run writes, how long it waits and what it shows."""

    directory: str = "runs"
    """The run writes into the folder of its name under this one."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds a collective or a transfer may take before it fails with an error that names it."""
    reward_processes: int = Field(default=1, ge=1)
    """Processes beside each worker that compute rewards."""
    recorded_prompts: int = Field(default=4, ge=0)
    """Prompts per step and recording rank whose samples are kept for the report; 0 prunes the recording node."""
    tensorboard: bool = True
    """Write TensorBoard events beside `metrics.jsonl`."""
    trace_steps: int = Field(default=20, ge=0)
    """Steps, from the first, of which each rank writes a Chrome trace; 0 writes none."""
