"""Writes the file of a job for a scheduler, and hands it to the scheduler's client."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from leaderless.config import RecipeError
from leaderless.config.packaged_files import how_to_install
from leaderless.run.clusters.options import OPTIONS, KubernetesOptions, TargetOptions

END_S = 60
"""Seconds that a scheduler leaves for the end of processes, beyond the time in which a step may be finished."""


class Client(NamedTuple):
    """A scheduler's client: its program, the way to get it, the command before a job's file, and the file's suffix."""

    program: str
    remedy: str
    command: Sequence[str]
    suffix: str


CLIENTS = {
    "slurm": Client(
        "sbatch", "run this command on a login node of the cluster, which has Slurm's programs", ["sbatch"], "sbatch"
    ),
    "kubernetes": Client(
        "kubectl",
        "install kubectl, and choose a context: kubectl config get-contexts",
        ["kubectl", "create", "-f"],
        "yaml",
    ),
    "ray": Client("ray", how_to_install("ray"), ["bash"], "sh"),
    "skypilot": Client(
        "sky", "pip install skypilot, with the extra of your cloud", ["sky", "jobs", "launch", "--yes"], "yaml"
    ),
}
"""Clients by the name of the scheduler."""


@dataclass(frozen=True)
class ClusterJob:
    """A training run on several machines."""

    recipe: str  # recipe, as the command on each machine names it
    overrides: Sequence[str]  # settings as `section.key=value`
    name: str
    nodes: tuple[int, int]  # smallest and largest number of machines
    workers: int  # number of workers on each machine
    grace_s: float  # seconds that a run may take to finish its step
    options: TargetOptions

    @property
    def target(self) -> str:
        """Name of the scheduler."""
        return next(name for name, kind in OPTIONS.items() if type(self.options) is kind)

    @property
    def file_name(self) -> str:
        """Name of the job's file, unless the user gives another one."""
        return f"{self.name}.{self.target}.{CLIENTS[self.target].suffix}"

    @cached_property
    def label(self) -> str:
        """The name in the form that Kubernetes and SkyPilot take: a DNS label of at most 40 characters.

        It begins with a letter, as the name of a service must.
        """
        label = re.sub(r"[^a-z0-9]+", "-", self.name.lower())
        return (label if label[0].isalpha() else f"run-{label}")[:40].strip("-")

    @property
    def warn_s(self) -> int:
        """Seconds between a scheduler's signal and the end."""
        return math.ceil(self.grace_s) + END_S

    def text(self) -> str:
        """The job's file."""
        options, (smallest, largest) = self.options, self.nodes
        templates = Environment(  # noqa: S701 - no HTML
            loader=PackageLoader("leaderless.run.clusters", "templates"),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        templates.filters["quote"] = shlex.quote
        gpus = getattr(options, "gpus_per_node", None)
        name = options.kind if isinstance(options, KubernetesOptions) else self.target
        return templates.get_template(f"{name}.jinja").render(
            job=self,
            options=options,
            words=[self.recipe, *self.overrides],
            train=shlex.join(["leaderless", "train", self.recipe, *self.overrides]),
            smallest=smallest,
            largest=largest,
            gpus_per_node=self.workers if gpus is None else gpus,
            warn_s=getattr(options, "warn_s", None) or self.warn_s,
        )


def submission(target: str, file: Path) -> list[str]:
    """The command that submits a job's file."""
    return [*CLIENTS[target].command, str(file)]


def check_client(target: str) -> None:
    """Refuse to submit without the scheduler's client; a RecipeError if it is not installed."""
    client = CLIENTS[target]
    if shutil.which(client.program) is None:
        raise RecipeError.at(
            "", f"--to {target} --go needs the program {client.program}, which is not on the path: {client.remedy}"
        )


def submit(target: str, file: Path) -> int:
    """Submit a job, with the output of the client on the terminal; return the client's exit code."""
    return subprocess.run(submission(target, file), check=False).returncode  # noqa: S603 - what the user asked for
