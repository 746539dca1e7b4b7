"""Checks of one machine. Imports torch only in the checks that need it."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from leaderless.base.devices import SHARED_MEMORY, SMALL_SHARED_MEMORY, find_accelerator
from leaderless.base.versions import REMEDY, unfit_versions
from leaderless.run.doctor.devices import check_devices
from leaderless.run.doctor.finding import Findings

GIB = 1 << 30
MIN_FILES, FEW_FILES = 256, 4096
"""Open files below which a run fails, or may fail: each pair of ranks and each file of a model takes one."""
SMALL_DISK = 10 * GIB
FEW_PROCESSES = 1024
CGROUP = Path("/sys/fs/cgroup")
INFINIBAND = Path("/sys/class/infiniband")


def check_python(findings: Findings) -> None:
    """Whether Python is new enough, and which packages are missing or of another version."""
    value = f"{platform.python_version()} ({sys.executable})"
    findings.fail_if(sys.version_info < (3, 11), "interpreter", value, "use Python 3.11 or newer")
    wrong = [*unfit_versions()]
    findings.fail_if(bool(wrong), "packages", "; ".join(wrong) or "all that leaderless needs", REMEDY)


def check_cores(findings: Findings) -> None:
    """Cores that this process may use, and a quota below them."""
    cores, quota = len(os.sched_getaffinity(0)), _quota()
    value = f"{cores} of {os.cpu_count()}" + ("" if quota is None else f", of which a control group allows {quota:g}")
    remedy = "processes start a thread for each core, and wait for each other: raise the quota, or set OMP_NUM_THREADS"
    findings.warn_if(quota is not None and quota < cores, "cores", value, remedy)


def _quota() -> float | None:
    """Cores that a control group allows; None for all."""
    file = CGROUP / "cpu.max"
    limit, _, period = file.read_text(encoding="utf-8").partition(" ") if file.exists() else ("max", "", "")
    return None if limit == "max" else int(limit) / int(period)


def check_memory(findings: Findings) -> None:
    """Main memory that is free, and a limit of a control group below it."""
    memory = psutil.virtual_memory()
    file = CGROUP / "memory.max"
    text = file.read_text(encoding="utf-8").strip() if file.exists() else "max"
    limit = f", of which a control group allows {int(text) / GIB:.1f}" if text != "max" else ""
    findings.ok("memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free{limit}")


def check_limits(findings: Findings) -> None:
    """Limits of the system that end runs."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < FEW_FILES
    remedy = f"ulimit -n {FEW_FILES * 16}, or LimitNOFILE of the service: each connection and file of a model takes one"
    note = findings.fail_if if 0 <= files < MIN_FILES else findings.warn_if
    note(few, "open files", _limit(files), remedy)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    remedy = "ulimit -u 4096: each worker has several processes"
    findings.warn_if(0 <= processes < FEW_PROCESSES, "processes", _limit(processes), remedy)
    if find_accelerator() is not None or INFINIBAND.exists():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        remedy = "ulimit -l unlimited: RDMA and pinned memory need it"
        findings.warn_if(locked != resource.RLIM_INFINITY, "locked memory", _limit(locked), remedy)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def check_shared_memory(findings: Findings) -> None:
    """Size of /dev/shm, which NCCL and data processes use."""
    size = shutil.disk_usage(SHARED_MEMORY).total
    remedy = "start the container with --shm-size=16g, or in Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    findings.warn_if(size < SMALL_SHARED_MEMORY, "shared memory", f"{size / GIB:.1f} GiB", remedy)


def check_host_name(findings: Findings) -> None:
    """Whether this machine knows its own name, by which others reach it."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        remedy = f"add a line for {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network's interface"
        findings.warn_if(True, "host name", f"{name} has no address ({error.strerror})", remedy)
        return
    is_loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    remedy = (
        "other machines, if there are any, cannot reach this address: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
        "to the network's interface"
    )
    findings.warn_if(is_loopback, "host name", f"{name} is {', '.join(addresses)}", remedy)


def check_sandbox(findings: Findings) -> None:
    """Whether programs of a policy can be run, which rewards and tools may need."""
    from leaderless.rewards.sandbox.sandboxes import choose_sandbox

    try:
        findings.ok("sandbox", choose_sandbox("auto").name)
    except RuntimeError as error:
        findings.warn_if(True, "sandbox", str(error), "needed by reward.code and Python tools alone")


def port_check(port: int) -> Callable[[Findings], None]:
    """The check whether a port is free on this machine."""

    def check_port(findings: Findings) -> None:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
            value = f"{port} cannot be used ({os.strerror(error.errno)})"
            findings.fail_if(True, "port", value, "give --rendezvous another port, above 1024, or end what uses it")
        else:
            findings.ok("port", f"{port} is free")

    return check_port


def source_hash() -> str:
    """A short hash of this package's source, which must be the same on all machines."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


CHECKS: tuple[Callable[[Findings], None], ...] = (
    check_python,
    check_devices,
    check_cores,
    check_memory,
    check_limits,
    check_shared_memory,
    check_host_name,
    check_sandbox,
)
"""All that need nothing but the machine."""
