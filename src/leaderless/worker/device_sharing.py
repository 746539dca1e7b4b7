"""The device of a rank: turns on it where two ranks share it, and a trace of its operations in one step.

One of two ranks on a device trains, and the other one generates while it does not.

The rank that trains goes first: it says that it wants the device, and the other one, which takes a turn for each step
of its engine, lets it pass. Locks on two files say so. The system releases them when a process ends, however it does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from leaderless.distributed.activity import Activity
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.clock import Clock, MayFail
from leaderless.planner import Plan, PlannedNode

FOLDER = Path("/dev/shm")  # noqa: S108 - the file has a name that no other run has
"""Folder of the files, in the memory of this machine, if there is such a one."""


class Files(NamedTuple):
    """The files of a device: locked by who wants it next, and by who has it."""

    wanted: int
    device: int


class DeviceSharing:
    """A rank's turns on its device, which it may share with another rank.

    Attributes:
        device: The device.
        clock: Clock of the rank.
    """

    def __init__(
        self, files: Files | None, device: torch.device, activity: Activity, clock: Clock, *, trains: bool
    ) -> None:
        """Take no turn yet; without `files`, no other rank uses the device.

        The rank records its waits in `activity` and `clock`, and `trains`, or the other one does.
        """
        self.device, self.clock = device, clock
        self._files, self._activity, self._trains = files, activity, trains

    @contextmanager
    def of(self, node: PlannedNode) -> Iterator[None]:
        """A turn for a node, on the rank that trains; the other one takes a turn for each step of its engine."""
        if self._files is None or not self._trains or not node.spec.roles:
            yield
            return
        with self._locked(self._files.wanted), self._locked(self._files.device):
            yield
            self._finish()

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """A turn for a step of the engine."""
        if self._files is None or self._trains:
            yield
            return
        with ExitStack() as stack:
            with self._locked(self._files.wanted):
                stack.enter_context(self._locked(self._files.device))
            yield
            self._finish()

    @contextmanager
    def _locked(self, file: int) -> Iterator[None]:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with self.clock.doing("wait_device"), self._activity.waiting("the device, which another rank uses"):
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _finish(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@contextmanager
def open_turns(plan: Plan, run: Path, device: torch.device, world: ProcessGroup) -> Iterator[DeviceSharing]:
    """The turns of a rank on its device; all ranks call it together, and the files are removed at the end.

    Raises:
        RuntimeError: Two ranks that share a device do not see the same files.
    """
    files, clock, owner = None, Clock(), plan.helpers.get(world.rank, world.rank)
    with ExitStack() as stack:
        if owner in plan.helpers.values():
            folder = FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir())
            name = hashlib.sha256(f"{os.getuid()} {run.resolve()} {owner}".encode()).hexdigest()[:16]
            wanted, held = (
                stack.enter_context(_opened(folder / f"leaderless-{name}-{x}")) for x in ("wanted", "device")
            )
            files = Files(wanted, held)
        if plan.helpers:
            _check_files(plan, files, world)
        yield DeviceSharing(files, device, world.activity, clock, trains=world.rank == owner)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield file
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


def _check_files(plan: Plan, files: Files | None, world: ProcessGroup) -> None:
    """Refuse ranks that would not take turns, as in containers that each have a memory of their own for files."""
    number = 0 if files is None else os.fstat(files.device).st_ino
    numbers = torch.cat(world.gather(torch.tensor([number]), "the files of devices that ranks share")).tolist()
    for helper, owner in plan.helpers.items():
        if numbers[helper] != numbers[owner]:
            raise RuntimeError(
                f"ranks {owner} and {helper} share a device, but not the folder {FOLDER}, where they take turns: start "
                "them in one container, or leave `helpers` of the channel out"
            )


def place_of_device(plan: Plan, rank: int, local_rank: int, local_world_size: int) -> tuple[int, int]:
    """The number of a rank's device among those that ranks of this machine use, and how many these are.

    Raises:
        RuntimeError: The rank shares the device of a rank of another machine.
    """
    here = range(rank - local_rank, rank - local_rank + local_world_size)
    owners = [one for one in here if one not in plan.helpers]
    owner = plan.helpers.get(rank, rank)
    if owner not in owners:
        raise RuntimeError(
            f"rank {rank} is to generate on the device of rank {owner}, which is on another machine: this one has "
            f"ranks {here.start} to {here.stop - 1}; change `helpers` of the channel"
        )
    return owners.index(owner), len(owners)


@contextmanager
def device_trace(path: Path, device: torch.device, may_fail: MayFail) -> Iterator[None]:
    """Record kernels, copies, and calls that start them or wait for them; without CUDA the operations of the CPU.

    The device is waited for at the end, so that everything that was started is in the trace. Nothing is written if an
    exception leaves the context.
    """
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        yield
        if is_cuda:
            torch.cuda.synchronize(device)
    with may_fail(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".new")
        found.export_chrome_trace(str(begun))
        begun.replace(path)
