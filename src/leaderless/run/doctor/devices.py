"""Checks of the accelerators of a machine. Imports torch only in them."""

from __future__ import annotations

import os
from itertools import permutations
from typing import TYPE_CHECKING

from leaderless.base.devices import (
    BACKENDS,
    DEVICE_FILES,
    DEVICE_FOLDER,
    SLOW_BFLOAT16,
    AcceleratorKind,
    find_accelerator,
    lacks_bfloat16,
    setup_device,
    unused_accelerators,
)
from leaderless.run.doctor.finding import Findings

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
LEAST_FREE = 0.9
"""Share of a device's memory below which something else uses it."""
NO_PEERS = "NCCL_P2P_DISABLE"
"""Environment variable by which NCCL sends nothing from device to device."""


def check_devices(findings: Findings) -> None:
    """Whether torch can use the accelerators of this machine, and has what ranks exchange tensors by."""
    import torch
    import torch.distributed as dist

    findings.ok("torch build", torch.__version__)
    kind = find_accelerator()
    if unused := unused_accelerators():
        problem, _, remedy = unused.partition(": ")
        findings.warn_if(True, "devices", f"the CPU; {problem}", remedy)
    elif kind is None:
        files = [file for pattern in DEVICE_FILES.values() for file in DEVICE_FOLDER.glob(pattern)]
        value = f"the CPU; {len(files)} accelerators are hidden" if files else "the CPU"
        findings.warn_if(bool(files), "devices", value, "unset CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES")
    else:
        _check_accelerators(kind, findings)
    if kind is None and lacks_bfloat16():
        findings.ok("numbers", f"float32; {SLOW_BFLOAT16}")
    value = "there" if dist.is_gloo_available() else "missing"
    findings.fail_if(not dist.is_gloo_available(), "gloo", value, "install a build of torch with gloo")


def _check_accelerators(kind: AcceleratorKind, findings: Findings) -> None:
    import torch
    import torch.distributed as dist

    from leaderless.worker.build.accelerator import unfit_packages

    try:
        setup_device(0, 1)
    except RuntimeError as error:
        problem, _, remedy = str(error).rpartition("; ")
        findings.fail_if(True, "devices", problem, remedy)
        return
    module = torch.get_device_module(kind)
    devices = [torch.device(kind, index) for index in range(module.device_count())]
    names = sorted({module.get_device_name(device) for device in devices})
    findings.ok("devices", f"{len(devices)} {kind}: {', '.join(names)}")
    for device in devices:
        _check_device(device, findings)
    for unfit in unfit_packages(["torch_npu"] if kind == "npu" else ["torch", "vllm"]):
        problem, _, remedy = unfit.partition(": ")
        findings.warn_if(True, "kernels", problem, remedy)
    backend = BACKENDS[kind]
    is_missing = not dist.is_backend_available(backend)
    findings.fail_if(is_missing, "backend", backend, f"install a build of torch with {backend}")
    if kind == "cuda" and len(devices) > 1:
        _check_peers(devices, findings)


def _check_device(device: torch.device, findings: Findings) -> None:
    """Whether torch has kernels for a device, what it computes, and whether its memory is free."""
    import torch

    from leaderless.worker.build.accelerator import knows_bfloat16, lacking_kernels, name_of

    if problem := lacking_kernels(device):
        problem, _, remedy = problem.partition(": ")
        findings.fail_if(True, "kernels", problem, remedy)
        return
    has_half = knows_bfloat16(device)
    value = "bfloat16" if has_half else f"no bfloat16 on {name_of(device)}"
    findings.warn_if(not has_half, "numbers", value, "set models.ROLE.compute_dtype: float32")
    free, total = torch.get_device_module(device).mem_get_info(device)
    is_used = free < LEAST_FREE * total
    value = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free on {device}" if is_used else "free"
    findings.warn_if(
        is_used, "device memory", value, "end the processes that use it, which nvidia-smi or npu-smi lists"
    )
    product = (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item()
    value = "right" if product == 512 else f"{product:g} instead of 512 on {device}"
    findings.fail_if(product != 512, "product of matrices", value, "replace the device")


def _check_peers(devices: list[torch.device], findings: Findings) -> None:
    """Whether devices reach each other without main memory."""
    import torch

    apart = [(a, b) for a, b in permutations(devices, 2) if not torch.cuda.can_device_access_peer(a.index, b.index)]
    is_off = os.environ.get(NO_PEERS, "0") not in {"", "0"}
    value = f"{NO_PEERS}={os.environ[NO_PEERS]}" if is_off else "each device reaches the others"
    if apart and not is_off:
        value = f"{len(apart)} pairs cannot reach each other, such as {apart[0][0]} and {apart[0][1]}"
    remedy = (
        f"what ranks exchange goes through main memory, which is slower: unset {NO_PEERS}, and turn off ACS and the "
        "IOMMU; most consumer cards cannot reach each other at all"
    )
    findings.warn_if(is_off or bool(apart), "device to device", value, remedy)
