"""Checks of one machine. Imports torch only in the checks that need it."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from uuid import uuid4

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


LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs", "apfs"})
"""File systems that other machines do not see."""
NUM_WRITES = 10
NUM_BYTES = 16 << 20
SLOW_S = 0.5
"""Seconds that a small write may take, of which there are several in each step."""
SLOW_MIB_PER_S = 50
CLOCK_S = 2.0
"""Difference between the clocks of a file server and a machine that is no delay of writing."""


def folder_check(folder: Path, *, is_shared: bool) -> Callable[[Findings], None]:
    """The check whether runs can be written to a folder, which need not exist yet; whether others must see it."""

    def check_folder(findings: Findings) -> None:
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        kind, free = _file_system(there), shutil.disk_usage(there).free
        remedy = "other machines do not see it: name a folder on shared storage as run.directory"
        value = f"{folder} on {kind or 'an unknown file system'}"
        findings.warn_if(is_shared and kind in LOCAL, "folder", value, remedy)
        remedy = "a checkpoint has 12 bytes for each weight: make room"
        findings.warn_if(free < SMALL_DISK, "disk", f"{free / GIB:.0f} GiB are free", remedy)
        if not os.access(there, os.W_OK | os.X_OK):
            findings.fail_if(
                True, "writing", f"{there} is not writable", "name another run.directory, or change its owner"
            )
            return
        trial = there / f".doctor-{uuid4().hex}"
        trial.mkdir()
        try:
            _check_writing(trial, findings)
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    return check_folder


def _check_writing(trial: Path, findings: Findings) -> None:
    """Renames, which files of a run rely on; how long writes take; and the clock of the file server."""
    file, other = trial / "file", trial / "other"
    seconds = []
    for number in range(NUM_WRITES):
        begin = time.perf_counter()
        _write(other, str(number).encode())
        other.replace(file)
        seconds.append(time.perf_counter() - begin)
    is_whole = file.read_text(encoding="utf-8") == str(NUM_WRITES - 1) and not other.exists()
    remedy = "checkpoints would be damaged: use another file system for run.directory"
    findings.fail_if(not is_whole, "renaming", f"{'replaces' if is_whole else 'does not replace'} a file", remedy)
    value = f"{median(seconds) * 1e3:.1f} ms each"
    findings.warn_if(median(seconds) > SLOW_S, "small writes", value, "steps wait for them: use faster storage")
    begin = time.perf_counter()
    _write(other, os.urandom(1 << 20) * (NUM_BYTES >> 20))
    speed = (NUM_BYTES >> 20) / (time.perf_counter() - begin)
    remedy = "checkpoints take long: use faster storage, or set checkpoint.every_steps"
    findings.warn_if(speed < SLOW_MIB_PER_S, "large writes", f"{speed:,.0f} MiB/s", remedy)
    before = time.time()
    _write(trial / "clock", b"")
    ahead = (trial / "clock").stat().st_mtime - (before + time.time()) / 2
    is_wrong = abs(ahead) > CLOCK_S
    value = f"differs from this machine's by {ahead:+.1f} s" if is_wrong else "agrees with this machine's"
    remedy = "synchronize the clocks of this machine and the file server (chrony, ntpd)"
    findings.warn_if(is_wrong, "clock of files", value, remedy)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _file_system(path: Path) -> str:
    """Kind of file system, as `ext4` or `nfs4`; empty if unknown."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path.resolve(), *path.resolve().parents) if parent in mounts), "")
