"""How the ranks of a loop agree when it ends."""

from __future__ import annotations

import torch

from leaderless.config.algorithm import LoopConfig
from leaderless.data.databuffer import Databuffer
from leaderless.data.transport import ProcessGroup
from leaderless.observability.metrics import Metrics
from leaderless.planner import Loop


def count_groups(loop: Loop, buffer: Databuffer, process_group: ProcessGroup) -> int:
    """Number of groups that the last node of a loop has chosen so far, those of an earlier step included.

    Args:
        loop: Entry of the chain.
        buffer: Databuffer of this rank.
        process_group: Ranks of the loop, which call it together and get the same answer.
    """
    is_first = process_group.rank in loop.layout and loop.layout.is_first_of_shard(process_group.rank)
    mine = torch.tensor([buffer.surplus.num_groups if is_first else 0])
    return int(process_group.sum(mine, f"the groups of '{loop.last}'"))


def check_filled(loop: Loop, num_groups: int, config: LoopConfig) -> None:
    """Refuse a step with too few groups, if it has none or the recipe says so.

    Args:
        loop: Entry of the chain.
        num_groups: Number of groups chosen in all rounds.
        config: Settings of loops.

    Raises:
        RuntimeError: The step cannot be trained.
    """
    if num_groups >= loop.num_groups or (num_groups and config.on_exhausted == "train"):
        return
    raise RuntimeError(
        f"node '{loop.last}' has chosen {num_groups} of the {loop.num_groups} groups that a step wants, after "
        f"algorithm.loop.max_rounds={config.max_rounds} rounds: the prompts are all too easy or all too hard for the "
        "policy, or their rewards fail; take other data, more responses_per_prompt or more rounds"
        + (", or set algorithm.loop.on_exhausted=train" if num_groups else "")
    )


def report_loop(loop: Loop, num_groups: int, num_rounds: int, metrics: Metrics) -> None:
    """Report how a loop went.

    Args:
        loop: Entry of the chain.
        num_groups: Number of groups chosen in all rounds.
        num_rounds: Number of rounds.
        metrics: Metrics of the loop's ranks.
    """
    metrics.max("sampling/rounds", num_rounds)
    metrics.max("sampling/carried", max(0, num_groups - loop.num_groups))
    metrics.max("sampling/missing", max(0, loop.num_groups - num_groups))
