"""Writes the file of a job for a scheduler."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jinja2 import Environment, PackageLoader, StrictUndefined

from leaderless.run.clusters.options import KubernetesOptions, RayOptions, SlurmOptions, TargetOptions

END_S = 60
"""Seconds that a scheduler leaves for the end of processes, beyond the time in which a step may be finished."""
_FILES = {"slurm": "sbatch", "kubernetes": "yaml", "ray": "sh", "skypilot": "yaml"}


@dataclass(frozen=True)
class ClusterJob:
    """A training run on several machines.

    Attributes:
        recipe: Recipe, as the command on each machine names it.
        overrides: Settings as `section.key=value`.
        name: Name of the run.
        nodes: Smallest and largest number of machines.
        workers: Number of workers on each machine.
        grace_s: Seconds that a run may take to finish its step.
        options: Options of the scheduler.
    """

    recipe: str
    overrides: Sequence[str]
    name: str
    nodes: tuple[int, int]
    workers: int
    grace_s: float
    options: TargetOptions

    @property
    def target(self) -> str:
        """Name of the scheduler."""
        return {SlurmOptions: "slurm", KubernetesOptions: "kubernetes", RayOptions: "ray"}.get(
            type(self.options), "skypilot"
        )

    @property
    def file_name(self) -> str:
        """Name of the job's file, unless the user gives another one."""
        return f"{self.name}.{self.target}.{_FILES[self.target]}"

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
        name = self.target
        if isinstance(self.options, KubernetesOptions):
            name = self.options.kind
        return _templates().get_template(f"{name}.jinja").render(job=self, options=self.options, **self._values())

    def _values(self) -> Mapping[str, object]:
        smallest, largest = self.nodes
        gpus = getattr(self.options, "gpus_per_node", None)
        return {
            "words": [self.recipe, *self.overrides],
            "train": shlex.join(["leaderless", "train", self.recipe, *self.overrides]),
            "smallest": smallest,
            "largest": largest,
            "gpus_per_node": self.workers if gpus is None else gpus,
            "warn_s": getattr(self.options, "warn_s", None) or self.warn_s,
        }


def _templates() -> Environment:
    loader = PackageLoader("leaderless.run.clusters", "templates")
    found = Environment(  # noqa: S701 - no HTML
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    found.filters["quote"] = shlex.quote
    return found
