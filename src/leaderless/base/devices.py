"""The one place that knows devices: what a rank computes on, and how ranks exchange tensors.

Importing it does not import torch, so that recipes can be read without.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

    import torch

AcceleratorKind = Literal["cuda", "npu"]
BACKENDS: dict[AcceleratorKind, str] = {"cuda": "nccl", "npu": "hccl"}
"""Library by which accelerators of a kind exchange tensors."""
VISIBLE_DEVICES: dict[AcceleratorKind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variable that selects a process's devices of a kind."""
VISIBLE_IN_ROCM = "HIP_VISIBLE_DEVICES"
"""Environment variable that comes before `CUDA_VISIBLE_DEVICES` in builds of torch for ROCm."""
DEVICE_FILES: dict[AcceleratorKind, str] = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
"""Files of devices in `DEVICE_FOLDER`, as a pattern."""
ROCM_FILE, WSL_FILE = "kfd", "dxg"
"""Files of all AMD GPUs, and in the Windows subsystem for Linux of all GPUs: whether torch can use one is not sure."""
DEVICE_FOLDER = Path("/dev")
CPU_FEATURES = Path("/proc/cpuinfo")
TRIM_EVERY_S = 0.2
SLOW_BFLOAT16 = "this CPU has no units for bfloat16, in which it takes 6 to 13 times as long as in float32"
THREADS = "OMP_NUM_THREADS"
"""Environment variable from which torch has its number of threads."""
SHARE = "LEADERLESS_SHARE"
"""Environment variable that is set where the launcher has set `THREADS` to a worker's share, and not the user."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is written there
COMPILERS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variable with the number of processes in which torch compiles kernels, next to each rank."""
MOST_COMPILERS = 32
"""Most of these processes next to a rank, as in torch."""
SMALL_SHARED_MEMORY = 1 << 30
"""Bytes of shared memory below which ranks of a machine may be unable to exchange tensors; containers have 64 MiB."""


@dataclass(frozen=True)
class DeviceSetup:
    """Device of one rank.

    Attributes:
        device: Device of weights and activations.
        backend: Backend of the process groups: gloo for host memory, next to the accelerator's own.
    """

    device: torch.device
    backend: str


def find_accelerator() -> AcceleratorKind | None:
    """Find the kind of accelerator that this process uses, without loading torch.

    There must be a device that the environment does not hide, and a package for it: Ascend's `torch_npu`, or a build of
    torch that is not for the CPU only. AMD GPUs are of the kind `cuda`, as in torch.
    """
    for kind in DEVICE_FILES:
        if not _is_hidden(kind) and _is_there(kind) and _is_supported(kind):
            return kind
    return None


def _is_hidden(kind: AcceleratorKind) -> bool:
    return os.environ.get(_visible_devices(kind), "0") in {"", "-1"}


def _visible_devices(kind: AcceleratorKind) -> str:
    """The environment variable by which devices of a kind are selected here."""
    is_rocm = kind == "cuda" and VISIBLE_IN_ROCM in os.environ and _is_built_for_rocm()
    return VISIBLE_IN_ROCM if is_rocm else VISIBLE_DEVICES[kind]


def _is_there(kind: AcceleratorKind) -> bool:
    """Whether this machine has a device of a kind that the installed torch may be able to use."""
    is_there = any(DEVICE_FOLDER.glob(DEVICE_FILES[kind]))
    is_amd, is_any = ((DEVICE_FOLDER / name).exists() for name in (ROCM_FILE, WSL_FILE))
    if kind != "cuda" or not (is_there or is_amd or is_any):
        return is_there
    if _is_built_for_rocm():
        return is_amd
    return is_there or (is_any and _num_by_driver() > 0)


def _num_by_driver() -> int:
    """Number of NVIDIA's GPUs, as its library for management counts them: unlike CUDA, it lets the process fork."""
    number = ctypes.c_uint()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        is_counted = library.nvmlInit_v2() == 0 and library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0
    except (OSError, AttributeError):  # no driver, or a very old one
        return 0
    return number.value if is_counted else 0


def _is_built_for_rocm() -> bool:
    """Whether torch is built for AMD GPUs, which not all of its version numbers say."""
    spec = find_spec("torch")
    about = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return about is not None and about.exists() and bool(re.search(r"^hip\b.*['\"]", about.read_text(), re.MULTILINE))


def _is_supported(kind: AcceleratorKind) -> bool:
    if kind == "npu":
        return find_spec("torch_npu") is not None
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def unused_accelerators() -> str:
    """Why accelerators of this machine are not used, and what to do; empty if there are none, or if they are hidden."""
    import torch

    for kind, pattern in DEVICE_FILES.items():
        number = len(list(DEVICE_FOLDER.glob(pattern)))
        if not number or _is_hidden(kind):
            continue
        if kind == "npu" and not _is_supported(kind):
            return (
                f"NPUs of this machine ({number}) are not used, since torch_npu is not installed: install the one for "
                f"torch {torch.__version__}"
            )
        if kind == "cuda" and (not _is_supported(kind) or torch.version.cuda is None):
            return (
                f"CUDA devices of this machine ({number}) are not used, since torch {torch.__version__} is built for "
                "the CPU: install a build for CUDA (see pytorch.org), or set CUDA_VISIBLE_DEVICES to nothing"
            )
    return ""


def lacks_bfloat16() -> bool:
    """Whether this machine's processor has no units for products in bfloat16: AVX-512 or AMX on x86, bf16 on ARM."""
    return CPU_FEATURES.exists() and re.search(r"bf16\b", CPU_FEATURES.read_text(encoding="utf-8")) is None


@cache
def can_pin(device_type: str) -> bool:
    """Whether the host has memory that devices of a kind read and write by themselves, which is tried once."""
    import torch

    if device_type == "cpu":
        return False
    try:
        torch.get_device_module(device_type)
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, AttributeError):  # not there for this kind of device
        return False
    return True


def setup_device(local_rank: int, local_world_size: int) -> DeviceSetup:
    """Choose and prepare this rank's device: CUDA, Ascend where `torch_npu` is installed, else the CPU.

    On the CPU the ranks of a machine share its cores, unless `OMP_NUM_THREADS` sets the number of threads. Processes
    that compile kernels share them on all devices, unless `TORCHINDUCTOR_COMPILE_THREADS` sets their number.

    Raises:
        RuntimeError: There are more ranks on the machine than accelerators, or a device that torch cannot use.
    """
    import torch

    num_cores = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    _limit_compilers(min(MOST_COMPILERS, num_cores))
    for kind, backend in BACKENDS.items():
        if (module := _usable_module(kind)) is None:
            continue
        device = torch.device(kind, _device_index(kind, module.device_count(), local_rank, local_world_size))
        module.set_device(device.index)
        return DeviceSetup(device, f"cpu:gloo,{kind}:{backend}")
    _refuse_unusable(find_accelerator())
    if THREADS not in os.environ:  # torch has read it already
        torch.set_num_threads(num_cores)
    return DeviceSetup(torch.device("cpu"), "gloo")


def threads_of_workers(num_workers: int) -> dict[str, str]:
    """Environment variables by which the workers of a machine share its cores, unless the user has set threads."""
    if THREADS in os.environ:
        return {}
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_workers))
    return {THREADS: threads, SHARE: threads}


@contextmanager
def cores_left(num_processes: int) -> Iterator[None]:
    """Let torch have fewer threads while processes next to this rank compute: one less for each, but at least one.

    Threads that the user has set by `OMP_NUM_THREADS` stay.
    """
    import torch

    threads = torch.get_num_threads()
    is_shared = THREADS not in os.environ or SHARE in os.environ
    fewer = max(1, threads - num_processes) if is_shared else threads
    torch.set_num_threads(fewer)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _limit_compilers(most: int) -> None:
    """Bound the processes in which torch compiles kernels; each rank would start one for each core of the machine."""
    if COMPILERS_VARIABLE in os.environ:
        return
    os.environ[COMPILERS_VARIABLE] = str(most)
    if (config := sys.modules.get("torch._inductor.config")) is not None:  # it has read the variable already
        config.compile_threads = most  # type: ignore[attr-defined]


def _device_index(kind: AcceleratorKind, count: int, local_rank: int, local_world_size: int) -> int:
    if local_world_size <= count:
        return local_rank
    variable = _visible_devices(kind)
    if count == 1 and os.environ.get(variable):  # the launcher has given each rank a device, under the same index
        return 0
    raise RuntimeError(
        f"{local_world_size} workers on a machine with {count} {kind} devices: start at most one worker for each, or "
        f"let {variable} select a device for each worker"
    )


def _usable_module(kind: AcceleratorKind) -> ModuleType | None:
    """The part of torch for a kind of device; None where there is none that can be used."""
    import torch

    try:
        if kind == "npu":
            import_module("torch_npu")
        module = torch.get_device_module(kind)
        return module if module.is_available() else None
    except Exception:  # noqa: BLE001 - as where torch_npu is missing, or misses a library; `_refuse_unusable` says why
        return None


def _refuse_unusable(kind: AcceleratorKind | None) -> None:
    """Refuse to train on the CPU of a machine that has an accelerator which torch is built for, and cannot use."""
    import torch

    rocm, cuda = torch.version.hip, torch.version.cuda
    if kind is None or (kind == "cuda" and rocm is None and cuda is None):
        return
    hidden = VISIBLE_DEVICES[kind]
    name, build, remedy = "an NPU", "", "run CANN's set_env.sh and install a torch_npu for this torch and driver"
    if kind == "cuda":
        name, build, remedy = "a CUDA device", f" (CUDA {cuda})", "install a build of torch for this driver"
    if kind == "cuda" and rocm is not None:
        hidden, name, build = VISIBLE_IN_ROCM, "an AMD GPU", f" (ROCm {rocm})"
        remedy = "add this user to the groups render and video, install a build of torch for this driver and GPU"
    why = "it is not available"
    try:
        if kind == "npu":
            import_module("torch_npu")
        torch.get_device_module(kind).init()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the reason)
        why = str(error).splitlines()[0]
    raise RuntimeError(
        f"this machine has {name} that torch {torch.__version__}{build} cannot use: {why}; {remedy}, or set {hidden} "
        "to nothing to train on the CPU"
    )


class DeviceType(NamedTuple):
    """Type of an accelerator.

    Attributes:
        name: Its model.
        total_bytes: All of its memory.
    """

    name: str
    total_bytes: int


def first_device() -> DeviceType | None:
    """Describe the first accelerator that this process can use; None without any."""
    for kind in BACKENDS:
        if (module := _usable_module(kind)) is not None:
            properties = module.get_device_properties(0)
            return DeviceType(str(properties.name), int(properties.total_memory))
    return None


def own_device_environment(device: torch.device) -> dict[str, str]:
    """The environment variable by which another process sees only this rank's device; none for the CPU."""
    for kind in VISIBLE_DEVICES:
        if device.type == kind:
            visible = os.environ.get(variable := _visible_devices(kind))
            return {variable: visible.split(",")[device.index] if visible else str(device.index)}
    return {}


def indexed(device: torch.device) -> torch.device:
    """A device by the name that its tensors give it: with the index of the current one, if it is named without any."""
    index: int | None = device.index
    if device.type not in BACKENDS or index is not None:
        return device
    import torch

    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def release_memory(device: torch.device) -> None:
    """Release the memory that an accelerator's allocator keeps, so that blocks of other sizes can be allocated."""
    if device.type != "cpu":
        import torch

        torch.get_device_module(device).empty_cache()


class DeviceUse(NamedTuple):
    """Use of an accelerator, by whichever processes.

    Attributes:
        used_bytes: Memory that is in use.
        total_bytes: All of its memory.
        percent: Share of the last moments in which it computed; None where it cannot be measured.
    """

    used_bytes: int
    total_bytes: int
    percent: float | None


def device_use(device: torch.device) -> DeviceUse | None:
    """Measure the use of an accelerator; None for the CPU."""
    if device.type == "cpu":
        return None
    import torch

    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    try:
        percent = float(module.utilization(device))
    except Exception:  # noqa: BLE001 - the driver's library may be missing, or raise its own errors: shown as unknown
        percent = None
    return DeviceUse(int(total - free), int(total), percent)


def trim_host_memory() -> None:
    """Return freed memory of this process to the system, where its allocator can.

    glibc keeps freed blocks below 32 MiB, as most weights are, so that a large phase would count in all that follow.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def host_memory_trimmed(device: torch.device) -> Iterator[None]:
    """Trim host memory several times a second while the CPU computes.

    Tensors of a pass do not fit into the gaps that earlier ones leave in glibc's heap, which so grows within the pass:
    by 1.3 GiB instead of 0.6 GiB in a pass of a model with 135 million weights on one of two ranks, at the same speed.
    To return each block as it is freed (`MALLOC_MMAP_THRESHOLD_=131072`) made a step 23 % to 46 % longer.
    """
    if device.type != "cpu":
        yield
        return
    is_over = threading.Event()

    def trim() -> None:
        while not is_over.wait(TRIM_EVERY_S):
            trim_host_memory()

    thread = threading.Thread(target=trim, name="trim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
