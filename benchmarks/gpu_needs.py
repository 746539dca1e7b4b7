"""What a machine with a GPU needs for the measurements, and the sizes that fit into its memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
SIZES = (
    ("1.5B", 16384, 82.5),
    ("1.5B", 12288, 70.5),
    ("1.5B", 8192, 58.5),
    ("0.5B", 8192, 26.0),
    ("0.5B", 4096, 20.5),
    ("0.1B", 4096, 5.5),
    ("0.1B", 2048, 5.0),
)
"""Presets with tokens of a training pass and the GiB that have to be free, the most interesting first.

They are those of `leaderless plan` for the pass with 8 % more, by which passes on a CPU have exceeded it.
"""
NAMED = (*SIZES, ("7B", 4096, 62.0))
"""Those, and one for new weights alone: those of the trainer in float32, and of two engines in bfloat16."""


Facts = Mapping[str, Any]
"""What `gpu_probe.py` has found."""


def problems(facts: Facts, device: str) -> tuple[list[str], list[str]]:
    """Why nothing can run on a machine, and what else is to be said of it, each with its remedy.

    Args:
        facts: Facts that `gpu_probe.py` has found.
        device: `cuda`, or `cpu` to try the script itself.
    """
    packages = facts["packages"]
    fatal = [
        f"this Python ({sys.executable}) has no {name}: name one that has it, as in make gpu-smoke PYTHON=/path/python3"
        for name in ("torch", "transformers")
        if packages[name] is None
    ]
    if not fatal and "build_error" in facts:
        fatal.append(f"torch cannot be imported ({facts['build_error']}): install it again")
    if fatal or device == "cpu":
        return fatal, []
    if facts["device"] is None:
        fatal.append(why_no_device(facts))
        return fatal, []
    said = []
    kinds = facts["architectures"]
    if not any(has_kernels(kind, facts["capability"]) for kind in kinds):
        here = f"compute capability {facts['capability']}"
        fatal.append(
            f"torch has no kernels for {facts['device']} ({here}; it has {' '.join(kinds)}): install another one"
        )
    if facts["compiler"] is None:
        fatal.append("there is no C compiler, which Triton needs: apt-get install gcc, or name one in CC")
    if facts["ptxas"] is None:
        fatal.append("there is no ptxas, since Triton came without it: install nvcc, or name one in TRITON_PTXAS_PATH")
    if facts["nvcc"] is None:
        said.append("no nvcc: nothing here needs it, since Triton has its own assembler; leave it out")
    return fatal, [*said, *memory_lines(facts["free_bytes"], facts["memory_bytes"])]


def memory_lines(free_bytes: float, total_bytes: float) -> list[str]:
    """Lines about a device of which the memory is in use, or too small for the largest model."""
    free, total, sizes = free_bytes / GIB, total_bytes / GIB, fitting_sizes(free_bytes)
    used = [f"only {free:.1f} of {total:.1f} GiB are free: end what uses the device, which nvidia-smi lists"]
    said = used * (free < 0.9 * total)
    if sizes is None:
        said.append(f"{free:.1f} GiB are free, and the smallest model needs {SIZES[-1][2]}: only tiny models are tried")
    elif sizes != SIZES[0][:2]:
        name, tokens = sizes
        said.append(
            f"{free:.1f} GiB are free: the model has {name} parameters and a training pass {tokens:,} tokens; "
            f"{SIZES[0][0]} and {SIZES[0][1]:,} need {SIZES[0][2]:.0f} GiB"
        )
    return said


def has_kernels(kind: str, capability: str) -> bool:
    """Whether kernels for an architecture, such as sm_86 or compute_90, run on devices of a capability, such as 8.9."""
    name, _, number = kind.partition("_")
    digits = re.sub(r"\D", "", number)
    major, minor = (int(part) for part in capability.split("."))
    is_older = (int(digits[:-1]), int(digits[-1])) <= (major, minor)
    return is_older and (name == "compute" or int(digits[:-1]) == major)


def fitting_sizes(free_bytes: float, preset: str = "") -> tuple[str, int] | None:
    """The most interesting preset that fits into a device's memory, and the tokens of a training pass, if one does.

    Args:
        free_bytes: Memory that is free.
        preset: The one that is wanted; any without it.
    """
    sizes = [size for size in NAMED if size[0] == preset] if preset else SIZES
    return next(((name, tokens) for name, tokens, gib in sizes if gib * GIB <= free_bytes), None)


def why_no_device(facts: Facts) -> str:
    """Why torch has no CUDA device, with the remedy."""
    cuda, driver = facts["cuda"], facts.get("driver")
    if cuda is None:
        return f"torch {facts['packages']['torch']} is built without CUDA: install one for CUDA (see pytorch.org)"
    if driver is None:
        files = f"{facts['device_files']} devices in /dev, " if facts["device_files"] else "no device in /dev, "
        return f"there is no GPU: {files}no driver (libcuda.so.1); in a container: --gpus all; elsewhere: --device cpu"
    if int(driver.split(".")[0]) < int(cuda.split(".")[0]):
        return (
            f"the driver is too old, it knows CUDA {driver}, and torch {facts['packages']['torch']} is for {cuda}: "
            f"update the driver, or install a torch for CUDA {driver} or older"
        )
    reason = facts.get("device_error", "no reason given")
    return f"torch finds no CUDA device ({reason}): look at nvidia-smi and CUDA_VISIBLE_DEVICES"
