"""The cluster file: every constant of the cost model, with its unit in its name."""

from __future__ import annotations

from pydantic import Field, model_validator

from leaderless.base.section import Section
from leaderless.config.models import ComputeType

GIB = 1 << 30


class DeviceConfig(Section):
    """Device of one rank."""

    compute_dtype: ComputeType = "bfloat16"
    """Type in which models compute that `models.ROLE.compute_dtype` gives none."""
    memory_gib: float = Field(gt=0)
    """Memory of the device; where a rank computes on its host's processors, its share of the host's."""
    peak_tflops: float = Field(gt=0)
    """Matrix products of the device at best, in the type that the model computes in."""
    training_utilization: float = Field(gt=0, le=1)
    """Share of the peak that a forward and backward pass reaches: model-FLOPs utilization."""
    scoring_utilization: float = Field(gt=0, le=1)
    """Share of the peak that a forward pass alone reaches, scoring or reading prompts."""
    memory_bandwidth_gb_per_s: float = Field(gt=0)
    """Reading from the device's memory at best."""
    decoding_utilization: float = Field(gt=0, le=1)
    """Share of that bandwidth which decoding reaches."""


class HostConfig(Section):
    """One machine."""

    devices: int = Field(ge=1)
    """Devices, and so ranks, of a host."""
    interfaces: int = Field(ge=1)
    """Network interfaces of a host, which its ranks share evenly."""
    memory_gib: float = Field(gt=0)
    """Main memory of a host."""


class LinkConfig(Section):
    """A link, the same in both directions, which are independent."""

    latency_us: float = Field(ge=0)
    """Time until the first byte of a message arrives."""
    bandwidth_gb_per_s: float = Field(gt=0)
    """Bytes a second in each direction."""


class LinksConfig(Section):
    """Links that carry bytes, by how far they go."""

    device: LinkConfig
    """Inside a rank: rows copied from and to buffers, and from and to the device."""
    host: LinkConfig
    """Between ranks of one host, for each rank."""
    network: LinkConfig
    """Between hosts, for each interface."""


class CoordinatorConfig(Section):
    """Constants of the data coordinator."""

    hop_latency_us: float = Field(ge=0)
    """One hop of the small collectives by which ranks agree, over TCP."""
    hop_bandwidth_gb_per_s: float = Field(gt=0)
    """Bandwidth of one TCP connection of these collectives."""
    assignment_us_per_row: float = Field(ge=0)
    """Assigning rows to shards; every rank does it for all rows."""


class DataloaderConfig(Section):
    """Reading and tokenizing prompts."""

    tokens_per_s: float = Field(gt=0)
    """Speed of one process; each rank has its own."""


class WorkloadConfig(Section):
    """Lengths of prompts and responses: lognormal, which has a heavy tail, and cut at the recipe's limits."""

    prompt_median_tokens: float = Field(ge=1)
    """Half of the prompts are shorter; none is longer than `data.max_prompt_tokens`."""
    prompt_sigma: float = Field(ge=0)
    """Standard deviation of the logarithm of a prompt's length."""
    response_median_share: float = Field(gt=0, le=1)
    """Half of the responses are shorter than this share of `rollout.max_response_tokens`; none is longer than that."""
    response_sigma: float = Field(ge=0)
    """Standard deviation of the logarithm of a response's length."""
    changed_share: float = Field(default=0.03, gt=0, le=1)
    """Share of the weights, in half precision, that an update changes: an assumption. The first updates of
    SmolLM2-135M with AdamW and a learning rate of 1e-6 change 0.4 percent."""


class ClusterConfig(Section):
    """Constants of machines, libraries and workload."""

    name: str = Field(min_length=1)
    """Name for the reader."""
    device: DeviceConfig
    """One device."""
    host: HostConfig
    """One machine."""
    links: LinksConfig
    """Links that carry bytes."""
    coordinator: CoordinatorConfig
    """The data coordinator."""
    dataloader: DataloaderConfig
    """Reading prompts."""
    workload: WorkloadConfig
    """Lengths of sequences."""

    @model_validator(mode="after")
    def _interfaces_are_shared_evenly(self) -> ClusterConfig:
        devices, interfaces = self.host.devices, self.host.interfaces
        if devices % interfaces:
            raise ValueError(
                f"host.interfaces={interfaces} does not divide the {devices} devices of a host: every interface must "
                "serve as many"
            )
        return self
