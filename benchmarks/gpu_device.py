"""A part of `benchmarks/gpu.py`: how fast the device is."""

from __future__ import annotations

import torch

from gpu_machine import Machine, Result


def speeds(machine: Machine) -> Result:
    """The speed of the device for a large product and for copying, from which bounds are computed."""
    square = torch.randn(machine.preset.square, machine.preset.square, device=machine.device, dtype=machine.dtype)
    data = torch.empty(machine.preset.copied, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(data)
    return {
        "flops": 2 * machine.preset.square**3 / machine.seconds(lambda: square @ square, 10),
        "bytes_per_s": 2 * machine.preset.copied / machine.seconds(lambda: target.copy_(data), 10),
    }
