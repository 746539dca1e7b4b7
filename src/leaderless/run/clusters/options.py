"""Options of each scheduler, beyond machines and workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from leaderless.base.section import Section

PORT = 29500


class TargetOptions(Section):
    """Options of every scheduler."""

    setup: tuple[str, ...] = ()
    """Shell commands to run on each machine before training, such as `source .venv/bin/activate`."""
    port: int = Field(default=PORT, ge=1024, le=64535)
    """Port at which the machines meet."""
    max_restarts: int = Field(default=20, ge=0)
    """Number of times that the job is started again, after a time limit, a preemption or a failure."""


class SlurmOptions(TargetOptions):
    """Options of `--to slurm`."""

    time: str = Field(default="12:00:00", pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")
    """Time limit, as `12:00:00` or `1-00:00:00`; before it, the step is finished, and the job is queued again."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account that pays."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the machines must have."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs of each machine; by default one for each worker, 0 for a cluster of CPUs."""
    cpus_per_task: int | None = Field(default=None, ge=1)
    """Cores of each machine; by default those that Slurm gives to one task."""
    memory: str | None = None
    """Memory of each machine, such as `200G`; `0` for all."""
    warn_s: int | None = Field(default=None, ge=1, le=65535)
    """Seconds before the time limit at which Slurm sends SIGUSR1; by default `run.grace_s` and a minute more."""
    output: str = "%x-%j.log"
    """File for the output of all starts of the job."""
    directives: tuple[str, ...] = ()
    """Further options of `sbatch`, such as `--reservation=research`."""

    @field_validator("directives")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if not text.startswith("-") or "\n" in text:
                raise ValueError(f"must be options of sbatch such as --reservation=research, not {text!r}")
        return value


class KubernetesOptions(TargetOptions):
    """Options of `--to kubernetes`."""

    image: str = Field(min_length=1)
    """Container image in which leaderless is installed."""
    kind: Literal["jobset", "pytorchjob"] = "jobset"
    """Resource to write: a JobSet, whose controller restarts all machines together, or Kubeflow's PyTorchJob."""
    namespace: str | None = None
    """Namespace; by default the current context's."""
    queue: str | None = None
    """Queue of Kueue."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that stands for an accelerator."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """Accelerators of each machine; by default one for each worker."""
    cpu: str | None = None
    """Cores of each machine, such as `64`."""
    memory: str | None = None
    """Memory of each machine, such as `512Gi`."""
    shared_memory: str = "64Gi"
    """Size of `/dev/shm`, which counts as memory of the machine."""
    volumes: Mapping[str, str] = {}
    """Folders by the name of the PersistentVolumeClaim; one of them must hold the run's folder."""
    working_directory: str | None = None
    """Folder in which the command runs, with the recipe; by default the image's."""
    environment: Mapping[str, str] = {}
    """Environment variables."""
    secrets: tuple[str, ...] = ()
    """Secrets whose entries become environment variables."""
    node_selector: Mapping[str, str] = {}
    """Labels that the machines must have."""
    priority_class: str | None = None
    """Class of priority."""
    service_account: str | None = None
    """Service account."""

    @field_validator("volumes")
    @classmethod
    def _are_absolute(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for claim, path in value.items():
            if not path.startswith("/"):
                raise ValueError(f"must give an absolute folder for claim {claim}, not {path!r}")
        return value


class RayOptions(TargetOptions):
    """Options of `--to ray`."""

    address: str | None = None
    """Address of the cluster's dashboard, such as `http://head:8265`; by default `$RAY_ADDRESS`, or a local one."""
    gpus_per_worker: float = Field(default=1, ge=0)
    """GPUs of each worker; 0 for a cluster of CPUs."""
    cpus_per_worker: float = Field(default=4, gt=0)
    """Cores of each worker."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK"] = "STRICT_SPREAD"
    """Where the machines' bundles are placed: each on a node of its own, apart if possible, or together if possible."""
    placement_timeout_s: float = Field(default=600, gt=0)
    """Seconds to wait for the largest number of machines, before fewer are used."""
    working_directory: str | None = None
    """Folder with the recipe that Ray sends to all nodes; by default, all nodes have it already."""


class SkypilotOptions(TargetOptions):
    """Options of `--to skypilot`."""

    accelerators: str | None = None
    """Accelerators of each machine, such as `H100:8`."""
    infra: str | None = None
    """Cloud, region or Kubernetes context, such as `aws/us-east-1`; by default the cheapest that there is."""
    use_spot: bool = True
    """Take machines that the cloud may take back; the job then continues on others."""
    image: str | None = None
    """Image of the machines, such as `docker:pytorch/pytorch`."""
    disk_size_gb: int = Field(default=256, ge=1)
    """Size of each machine's disk."""
    bucket: str | None = None
    """Bucket for runs, such as `s3://my-bucket`, mounted at `/runs`; without one, checkpoints are on the machine."""
    install: tuple[str, ...] = ("pip install --editable .",)
    """Shell commands that install the package, once on each machine; the default does from `working_directory`, if that
    is a copy of the project."""
    working_directory: str = "."
    """Folder with the recipe that SkyPilot copies to all machines."""


OPTIONS: Mapping[str, type[TargetOptions]] = {
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
    "ray": RayOptions,
    "skypilot": SkypilotOptions,
}
"""Options by the name of the scheduler."""
