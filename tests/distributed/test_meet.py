"""Loops that come together after a step: the one that is ahead may come as many iterations later as it is ahead."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import torch
from tests.distributed.ranks import RankPool
from tests.unit.recipes import plan_of

from leaderless.data.buffer.databuffer import Databuffer
from leaderless.distributed.transport import Transport
from leaderless.observability.clock import Tracer
from leaderless.observability.run_directory import RunDirectory
from leaderless.worker.asynchronous.channels import Channels, add_process_groups
from leaderless.worker.build.parts import Parts, Progress

TIMEOUT_S = 1.0
LATE_S = 1.2
"""Time after which the loop that generates comes."""


def meet_late(capacity: int, mode: str) -> tuple[float, float]:
    """When this rank comes to the place where loops meet, and when it leaves it; rank 0 generates."""
    channels = {"rollout": {"capacity": capacity, "mode": mode}}
    layout = {"rollout": {"ranks": "0"}} | {name: {"ranks": "1"} for name in ("reward", "advantage", "policy")}
    plan = plan_of("grpo", 2, layout=layout, channels=channels)
    transport, progress = Transport(torch.device("cpu"), TIMEOUT_S), Progress({}, step=3, trained=3)
    add_process_groups(plan, transport)
    directory = SimpleNamespace(journal_of=lambda _: None, may_fail=None)
    parts = SimpleNamespace(
        plan=plan,
        transport=transport,
        recipe=SimpleNamespace(run=SimpleNamespace(timeout_s=TIMEOUT_S)),
        directory=cast("RunDirectory", directory),
    )
    ends = Channels(cast("Parts", parts), progress, cast("Databuffer", None), cast("Tracer", None))
    if transport.rank == 0:
        time.sleep(LATE_S)
    begin = time.monotonic()
    ends.meet()
    end = time.monotonic()
    if not plan.is_continuous:
        transport.world.max(torch.tensor([0]), "what both loops do next")
    ends.close()
    return begin, end


def test_a_loop_that_trains_waits_for_one_that_is_ahead_as_long_as_channels_may(ranks: RankPool) -> None:
    generating, training = ranks.run(2, meet_late, 2, "fixed_lag")
    assert training[1] > generating[0], "what comes next has less patience"


def test_nobody_is_waited_for_where_generation_is_continuous(ranks: RankPool) -> None:
    generating, training = ranks.run(2, meet_late, 1, "continuous")
    assert training[1] < generating[0]
