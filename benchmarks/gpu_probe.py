"""What a machine has of that which the GPU measurements need, as a line of JSON: `python benchmarks/gpu_probe.py`.

Each fact is found by itself: what is missing or fails is said, so that all of it is known at once.
"""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

MARK = "MEASURED "
PACKAGES = ("torch", "transformers", "triton", "numpy")
Facts = dict[str, object]


def facts() -> Facts:
    """Facts by name; those that torch has to know are `None` or missing where it does not."""
    found: Facts = {
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "device_files": len([*Path("/dev").glob("nvidia[0-9]*")]),
        "nvcc": shutil.which("nvcc"),
        "ptxas": triton_assembler() or shutil.which("ptxas"),
        "compiler": shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
        "device": None,
    }
    for fact in (driver, build, device, attention):
        try:
            found |= fact()
        except Exception as error:  # noqa: BLE001 - drivers and broken packages fail in many ways
            found[f"{fact.__name__}_error"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return found


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def triton_assembler() -> str | None:
    """The assembler that Triton brings along."""
    spec = find_spec("triton")
    found = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec and spec.origin else None
    return str(found) if found and found.exists() else None


def driver() -> Facts:
    """The newest CUDA that the driver knows, such as 13.0."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return {"driver": f"{number.value // 1000}.{number.value % 1000 // 10}"}


def build() -> Facts:
    """The CUDA for which torch is built."""
    import torch

    return {"cuda": torch.version.cuda}


def device() -> Facts:
    """The first device, and its memory."""
    import torch

    torch.cuda.init()
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "architectures": torch.cuda.get_arch_list(),
        "memory_bytes": total,
        "free_bytes": free,
    }


def attention() -> Facts:
    """The interface of attention over packed texts."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return {"varlen_attn": str(inspect.signature(varlen_attn))}


if __name__ == "__main__":
    print(MARK + json.dumps(facts()), flush=True)
