"""The one place that knows devices: what a rank computes on, and how ranks talk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class DeviceSetup:
    """What one rank computes on.

    Attributes:
        device: For weights and activations.
        backend: Of the process groups: gloo for host memory, and the accelerator's own beside it.
        payload_device: Where bytes that travel between ranks have to be.
    """

    device: torch.device
    backend: str
    payload_device: torch.device


def setup_device(local_rank: int, local_world_size: int) -> DeviceSetup:
    """Choose and prepare this rank's device: CUDA, Ascend where `torch_npu` is installed, else the CPU.

    On the CPU the ranks of a machine share its cores, unless `OMP_NUM_THREADS` gives each a number of threads.

    Args:
        local_rank: Which of the machine's ranks this is.
        local_world_size: How many ranks share the machine.

    Raises:
        RuntimeError: There are more ranks on the machine than accelerators.
    """
    host = torch.device("cpu")
    for kind, backend in (("cuda", "nccl"), ("npu", "hccl")):
        if kind == "npu" and find_spec("torch_npu") is None:
            continue
        if kind == "npu":
            __import__("torch_npu")
        module = torch.get_device_module(kind)
        if not module.is_available():
            continue
        if local_world_size > module.device_count():
            raise RuntimeError(
                f"{local_world_size} workers on a machine with {module.device_count()} {kind} devices: "
                "start at most one worker for each"
            )
        module.set_device(local_rank)
        device = torch.device(kind, local_rank)
        return DeviceSetup(device, f"cpu:gloo,{kind}:{backend}", device)
    if "OMP_NUM_THREADS" not in os.environ:  # torch has taken what it says
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    return DeviceSetup(host, "gloo", host)


def release_memory(device: torch.device) -> None:
    """Give back what the allocator of an accelerator keeps for later, so that pieces of other sizes find room.

    Args:
        device: Of the rank.
    """
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has used: the accelerator's, or the process's resident set.

    Args:
        device: Of the rank.
    """
    if device.type == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated())
