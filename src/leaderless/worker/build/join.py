"""Brings the workers of a run together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal
from uuid import uuid4

import torch
import torch.distributed as dist

from leaderless.base.devices import DeviceSetup, setup_device
from leaderless.data.buffer.databuffer import WINDOWS
from leaderless.distributed.activity import Activity
from leaderless.distributed.one_sided.endpoint import NixlEndpoint
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.planner import Plan, Reshard, format_ranks
from leaderless.planner.plan import layouts_with_axes, process_groups
from leaderless.worker.asynchronous import channels
from leaderless.worker.device_sharing import place_of_device
from leaderless.worker.rank_info import RankInfo

SHARED_FOLDER_S = 5.0
"""Longest time for a new file to appear on other machines."""


@contextmanager
def join_workers(
    place: RankInfo, plan: Plan, timeout_s: float, activity: Activity, moved_by: Literal["torch", "nixl"] = "torch"
) -> Iterator[tuple[Transport, torch.device]]:
    """Meet the other workers, compare plans, and make the process groups that the plan needs.

    Waits for other workers last at most `timeout_s`, here and later. Rows and weights are `moved_by` a library. Yields
    the connection and this worker's device.

    Raises:
        RecipeError: NIXL is to move them, and cannot be used on this machine.
        RuntimeError: Workers have made different plans, or this one shares the device of one of another machine.
    """
    setup = setup_device(*place_of_device(plan, place.rank, place.local_rank, place.local_world_size))
    timeout = timedelta(seconds=timeout_s)
    if place.world_size == 1:
        join_nobody(setup, timeout)
    else:
        meet(place, setup, timeout)
    endpoint = NixlEndpoint(place.rank) if moved_by == "nixl" and place.world_size > 1 else None
    transport = Transport(setup.device, timeout_s, activity=activity, sharing=plan.helpers, endpoint=endpoint)
    if others := transport.world.unlike_first(plan.hash(), "the plans of all workers"):
        raise RuntimeError(
            f"rank {place.rank}: ranks {format_ranks(others)} have made another plan than rank 0: "
            "start all workers with the same recipe, overrides, code and number of workers, on machines of one kind "
            "(models.ROLE.compute_dtype is bfloat16 on those with accelerators, unless it is set)"
        )
    add_process_groups(plan, transport)
    try:
        yield transport, setup.device
    except BaseException as error:
        transport.close(f"{type(error).__name__}: {error}")
        # The peers may be gone, and leaving could wait for them, so the process just ends. A single worker may be part
        # of a program that continues.
        if place.world_size == 1:
            _leave()
        raise
    transport.close()
    _leave()


def meet(place: RankInfo, setup: DeviceSetup, timeout: timedelta) -> None:
    """Wait for all ranks, and make the process group of the world. All ranks call it together."""
    dist.init_process_group(
        setup.backend,
        init_method=f"file://{place.store}" if place.store else "env://",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        # No device_id: with one, torch splits NCCL's communicator of the world for each process group, so that the
        # cost on a rank grows with groups that it is not in, and a group of host memory (gloo) waits for all ranks.
    )


def add_process_groups(plan: Plan, transport: Transport) -> None:
    """Make the process groups of a plan that there are none of yet. All ranks of the world call it together."""
    transport.add_axes(layouts_with_axes(plan))
    for ranks in process_groups(plan):
        transport.add_process_group(ranks)
    channels.add_process_groups(plan, transport)
    for action in plan.windowed.body if plan.windowed else ():
        if isinstance(action, Reshard):
            transport.add_lane(WINDOWS, action.ranks)


def join_nobody(setup: DeviceSetup, timeout: timedelta | None = None) -> None:
    """Be the only rank. Sharding, which mixed precision needs, takes a process group even then.

    Raises:
        RuntimeError: This process has a default process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group of torch.distributed already: destroy it first, or use another process"
        )
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(setup.backend, store=store, rank=0, world_size=1, timeout=timeout)


def _leave() -> None:
    if dist.is_initialized():  # an engine that ran in this process destroys it when it ends
        dist.destroy_process_group()


def check_shared(folder: Path, world: ProcessGroup) -> None:
    """Make sure that all workers see the same folder, which is made if it is not there. All ranks call it together.

    Raises:
        RuntimeError: Rank 0 cannot write to the folder, or some rank has another folder of that name.
    """
    what = "whether all workers see the run's folder"
    name, problem = f".met-{uuid4().hex}", ""
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as error:
            problem = str(error)
    problem = world.broadcast_text(problem, 0, what)
    if problem:
        raise RuntimeError(
            f"rank 0 cannot write to the run's folder {folder} ({problem}): "
            "give run.directory as a folder that this user may write to"
        )
    token = folder / world.broadcast_text(name, 0, what)
    end = time.monotonic() + SHARED_FOLDER_S
    while not (is_seen := token.exists()) and time.monotonic() <= end:
        time.sleep(0.1)
    blind = torch.cat(world.gather(torch.tensor([int(not is_seen)]), what)).nonzero().squeeze(1).tolist()
    if world.rank == 0:
        token.unlink(missing_ok=True)
    if blind:
        raise RuntimeError(
            f"ranks {format_ranks(tuple(blind))} do not see the folder {folder} of rank 0: "
            "give run.directory as an absolute path on storage that all machines share"
        )
