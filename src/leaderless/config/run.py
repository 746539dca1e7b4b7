"""Behavior of a run: what it writes and keeps, where numbers go, how long it waits, how it reacts to bad numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from leaderless.base.section import Section, ShorthandSection


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 for the clock alone. One is always written at the end."""
    every_minutes: float = Field(default=10.0, ge=0)
    """Minutes since the last checkpoint after which the next step that ends writes one; 0 turns the clock off."""
    asynchronous: bool = True
    """Write from a copy in host memory while training continues; else training waits until everything is written."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every_steps: int = Field(default=0, ge=0)
    """Also keep the checkpoints of steps that this number divides; 0 for none."""
    best_metric: str | None = None
    """Metric, such as `evaluation/mean@1`, whose best checkpoint is kept as well; see [Metrics](metrics.md)."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the highest or the lowest value of `best_metric` is the best."""


class RunConfig(Section):
    """Folder, time limits and records of a run."""

    directory: str = "runs"
    """Folder of all runs, in which each run has a folder of its name."""
    offload_folder: str | None = None
    """Folder, on each machine, of the files that `optimizer.offload`, `training.offload_frozen` and
    `models.<role>.offload_activations` may need: a fast disk of the machine itself is best. By default, it is `offload`
    in the folder of the run. The files have no names, and are gone with the processes of the run."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a collective or an exchange between ranks may take before it fails with an error that names it."""
    transport: Literal["torch", "nixl"] = "torch"
    """Library that moves rows and weights between ranks: torch, by gloo, NCCL or HCCL; or NIXL, by UCX, which needs the
    extra `nixl`. Collectives, and messages in the middle of a pass, are torch's in any case."""
    stall_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds without progress on any rank, after which the stacks of all ranks are saved and the workers restarted;
    half of `timeout_s` if that is less, because other ranks do not wait longer for a rank that hangs."""
    grace_s: float = Field(default=60.0, gt=0)
    """Seconds after a signal to stop other than Ctrl-C, such as SIGTERM, in which to finish the step and write a
    checkpoint; then the step is abandoned, and the run continues from the state before it."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of times that `leaderless train` restarts its workers after failures; each new checkpoint resets the
    count."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """Refuse a run, or only warn, if by the plan's estimate it does not fit into the memory of a rank even with passes
    of one sample. A run that may only just fit always starts with a warning."""
    reward_processes: int = Field(default=1, ge=0)
    """Processes next to each worker that compute rewards. With 0, the worker computes them itself, for debuggers and
    notebooks; then time limits are not enforced, and a reward that crashes ends the worker."""
    recorded_prompts: int = Field(default=4, ge=0)
    """Prompts per step and recording rank whose samples are kept for the report; 0 prunes the recording node."""
    kept_episodes: int = Field(default=100, ge=0)
    """Number of newest steps of which all episodes in an environment are kept, to be read and played again; of the
    steps before, about as many are kept as well, evenly spread. 0 writes none."""
    follow: str | None = None
    """Run whose continuous generation is done again: its name, or its folder. New weights are taken between the same
    two tokens as there, the layout changes after the same steps, and episodes come from its folder `episodes`, so that
    every number is the same."""
    status_every_s: float = Field(default=2.0, ge=0)
    """Seconds after which each rank writes what it is doing and the memory it uses, for `leaderless ui`, and looks
    whether `leaderless stop` has been called or another rank is preempted; 0 for never. With more than 128 ranks they
    are longer."""
    tags: tuple[str, ...] = ()
    """Words for people, by which `leaderless ls` and the live page find runs."""
    trace_steps: int = Field(default=20, ge=0)
    """Number of first steps of which each rank writes a Chrome trace; 0 for none."""
    profiled_step: int = Field(default=0, ge=0)
    """Step of which each rank also writes every operation of its CUDA device, or else of the CPU, as a Chrome trace of
    torch's profiler, which makes that step slower; 0 for none. Ranks that generate continuously write none."""


GuardAction = Literal["warn", "skip", "roll_back", "stop"]
"""Actions from the mildest to the strongest; if several guards are violated in a step, the strongest is taken."""


MIN_FAILURES = 8
"""Smallest number of failures in a row after which a reward is given up, or a judge is not asked any more."""


class GuardsConfig(Section):
    """Reactions to bad numbers.

    `warn` continues; `skip` leaves out the update on all ranks and continues; `roll_back` returns to the newest
    checkpoint and skips the prompts used since then; `stop` ends the run and keeps its last checkpoint.
    """

    non_finite_loss: GuardAction = "skip"
    """Action if the loss of an update is NaN or infinite on any rank."""
    non_finite_gradient: Literal["skip", "roll_back", "stop"] = "skip"
    """Action if the norm of the gradient is NaN or infinite; such a gradient never reaches the weights."""
    max_skips: int = Field(default=4, ge=0)
    """Number of updates of a node that may be skipped in a row; one more stops the run, and so does the last of a run
    if all were skipped."""
    grad_norm_limit: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient before clipping; null for no limit."""
    grad_norm_factor: float | None = Field(default=None, gt=1)
    """Largest norm as a multiple of the median over the node's last 50 updates, from the sixth update on; null for no
    limit."""
    grad_norm_action: GuardAction = "skip"
    """Action if the norm is above one of these limits."""
    entropy_limit: float | None = Field(default=None, gt=0)
    """Smallest mean entropy of the policy over the tokens that an update trains on, in nats; null for no limit."""
    entropy_action: GuardAction = "warn"
    """Action if the entropy is below the limit."""
    effective_samples_limit: float | None = Field(default=0.5, gt=0, le=1)
    """Smallest effective sample size of the ratios between trainer and engine, as a share of an update's tokens (the
    metric `mismatch/effective_samples`); null for no limit."""
    effective_samples_action: GuardAction = "warn"
    """Action if it is below the limit. A warning is followed by no other one of the node for 20 steps."""
    reward_failures_limit: float | None = Field(default=0.5, ge=0, lt=1)
    """Largest share of a step's responses whose reward may fail, or of episodes in SAC; null for no limit. A reward
    that has failed on the first eight responses of a step (on more if the limit is above 0.5) is given up: it grades no
    further ones of that step, which count as failed."""
    reward_failures_action: Literal["warn", "roll_back", "stop"] = "stop"
    """Action at the end of a step in which more rewards failed."""
    failures_limit: float | None = Field(default=0.1, ge=0, lt=1)
    """Largest share of a step's episodes that may have met a failure of one kind, whatever was done about it (the
    metrics `failure/*`); of any kind but the policy's own. null for no limit."""
    failures_action: Literal["warn", "roll_back", "stop"] = "warn"
    """Action at the end of a step in which more have. After a warning there is no other one of the kind for 20
    steps."""
    max_roll_backs: int = Field(default=3, ge=1)
    """Number of times that a run may roll back; then it stops instead."""

    @property
    def hopeless_failures(self) -> int | None:
        """Failures in a row after which a reward is given up: if its true share is the limit, in 1 of 256 cases."""
        limit = self.reward_failures_limit
        if not limit:
            return None if limit is None else MIN_FAILURES
        return max(MIN_FAILURES, math.ceil(8 / -math.log2(limit)))


class LoggerConfig(ShorthandSection):
    """A tracker that gets the numbers, the recipe, samples and the report of a run; a bare name is its type."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, `prometheus` or `opentelemetry`; or a custom logger as
    `package.module:Class`. See [Loggers](../guides/loggers.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor, such as `project`."""
    tables_every_steps: int = Field(default=10, ge=0)
    """Steps between tables of recorded samples and of episodes, from step 1 on; 0 for none. Tables of evaluations are
    sent as well, unless it is 0."""
    finish_s: float = Field(default=60.0, gt=0)
    """Seconds after the last step in which to send what is left; what does not get through by then stays in the folder
    of the run."""
