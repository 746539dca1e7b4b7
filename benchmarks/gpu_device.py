"""Parts of `benchmarks/gpu.py`: what the machine is, and how fast its device is."""

from __future__ import annotations

import inspect
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn.attention.varlen import varlen_attn

from gpu_machine import Machine, Result


def environment(machine: Machine) -> Result:
    """Versions, the device, and what compiling needs."""
    packages = {}
    for name in ("torch", "transformers", "triton", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    found: Result = {
        "device": "a CPU, to try the script",
        "python": platform.python_version(),
        "packages": packages,
        "varlen_attn": str(inspect.signature(varlen_attn)),
        "compiler": shutil.which("cc") or shutil.which("gcc") or "none",
    }
    if machine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(machine.device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def speeds(machine: Machine) -> Result:
    """The speed of the device for a large product and for copying, from which bounds are computed."""
    square = torch.randn(machine.preset.square, machine.preset.square, device=machine.device, dtype=machine.dtype)
    data = torch.empty(machine.preset.copied, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(data)
    return {
        "flops": 2 * machine.preset.square**3 / machine.seconds(lambda: square @ square, 10),
        "bytes_per_s": 2 * machine.preset.copied / machine.seconds(lambda: target.copy_(data), 10),
    }
