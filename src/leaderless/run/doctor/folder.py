"""Checks of the folder of all runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from uuid import uuid4

import psutil

from leaderless.run.doctor.finding import Findings
from leaderless.run.doctor.machine import GIB, SMALL_DISK

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
    """The check whether runs can be written to a folder.

    Args:
        folder: Folder of all runs; it need not exist yet.
        is_shared: Whether other machines must see it.
    """

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
