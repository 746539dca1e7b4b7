"""How workers meet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from leaderless.data.transport import Transport
from leaderless.device import setup_device
from leaderless.planner import Plan, flat, format_ranks
from leaderless.worker.place import Place

STORE_VARIABLE = "LEADERLESS_STORE"
"""A file that the workers of one machine meet at; without it they meet as torch elastic has arranged."""


@contextmanager
def join_workers(place: Place, plan: Plan, timeout_s: float) -> Iterator[tuple[Transport, torch.device]]:
    """Meet the other workers, compare plans, and make the groups that the plan needs.

    Args:
        place: Of this worker.
        plan: Of this worker; it must be everybody's.
        timeout_s: Longest wait for others, here and later.

    Yields:
        How to talk to the others, and this worker's device.

    Raises:
        RuntimeError: Workers have made different plans.
    """
    setup = setup_device(place.local_rank, place.local_world_size)
    timeout = timedelta(seconds=timeout_s)
    if place.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(setup.backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        meeting_file = os.environ.get(STORE_VARIABLE)
        method = f"file://{meeting_file}" if meeting_file else "env://"
        dist.init_process_group(
            setup.backend, init_method=method, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    transport = Transport(setup.payload_device, timeout_s)
    _compare_plans(plan, transport)
    for action in flat(plan.schedule):
        transport.add_group(plan.ranks_of(action))
    for instance in plan.instances:
        transport.add_group(instance.layout.ranks)
    yield transport, setup.device
    # After an error the peers may be gone, and taking leave could wait for them: the process just ends.
    dist.destroy_process_group()


def _compare_plans(plan: Plan, transport: Transport) -> None:
    world, what = transport.world, "the plans of all workers"
    number = int(plan.hash()[:15], 16)
    bounds = world.max(torch.tensor([number, -number]), what)
    if bounds[0] == -bounds[1]:
        return
    numbers = torch.cat(world.gather(torch.tensor([number]), what))
    others = tuple((numbers != numbers[0]).nonzero().squeeze(1).tolist())
    raise RuntimeError(
        f"rank {world.rank}: ranks {format_ranks(others)} have made another plan than rank 0: "
        "start all workers with the same recipe, overrides, code and number of workers"
    )
