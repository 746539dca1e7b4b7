"""A rank alone with NCCL, and two ranks that share a GPU: what a single device can show of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_one_device import (
    check_talk,
    collectives_of_one,
    own_weights,
    read_weights_of_the_other,
    sharded_update_of_one,
    sum_alone_and_talk,
)
from tests.loops import PROMPTS, RESPONSES, UPDATES, Runs, Seen, numbers, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
HELPING = {"capacity": 1, "mode": "continuous", "helpers": {0: 1}}
"""The rank that generates uses the device of the one that trains."""


def test_a_rank_alone_gets_back_what_it_sends_with_nccl(ranks: RankPool) -> None:
    ranks.run(1, collectives_of_one, "cuda", init_group=False)


def test_a_gradient_in_one_shard_on_a_gpu_has_the_norm_of_the_whole(ranks: RankPool) -> None:
    ((norm, by_hand),) = ranks.run(1, sharded_update_of_one, "cuda", init_group=False)
    assert norm == pytest.approx(by_hand, rel=1e-4)


def test_ranks_that_share_a_gpu_talk_through_host_memory_next_to_nccl(ranks: RankPool) -> None:
    check_talk(ranks.run(2, sum_alone_and_talk, "cuda", init_group=False))


def test_a_rank_reads_weights_in_the_gpu_memory_of_another(ranks: RankPool) -> None:
    _, found = ranks.run(2, read_weights_of_the_other, "cuda", init_group=False)
    assert found == [name for name, _ in own_weights(torch.device("cpu"))]


def train_on_one_gpu(recipe: str, overrides: Sequence[str]) -> tuple[Seen, int]:
    """Be one worker of a run; returns what it saw but for weights, and the most memory of the device that it had."""
    seen = train(recipe, overrides)
    seen.weights = {}  # they would travel to a process that does not use the device
    return seen, torch.cuda.max_memory_allocated()


def test_a_rank_generates_on_the_gpu_of_the_rank_that_trains(ranks: RankPool, tmp_path: Path) -> None:
    runs = Runs(ranks, tmp_path)
    changes = {"training.compile": False, "evaluation.every_steps": 0, "optimizer.learning_rate": 1e-4}
    recipe = runs.recipe(1, 1, HELPING, **changes)
    results = ranks.run(
        2, train_on_one_gpu, str(recipe), ["name=helped", "steps=3"], init_group=False, timeout_s=90.0, deadline_s=95.0
    )
    assert all(peak > 0 for _, peak in results), "both have computed on it"
    (_, training), rows = (seen for seen, _ in results), numbers(runs.directory("helped"))
    assert training.done == (3, 3)
    assert {len(samples) for samples in training.trained.values()} == {PROMPTS * RESPONSES}
    versions = {step: {version for _, version in one.values()} for step, one in training.trained.items()}
    assert max(versions[3]) >= UPDATES, "weights have come to the rank that generates"
    assert all(row["staleness/oldest"] <= UPDATES for row in rows)
    assert all(row["mismatch/abs_mean"] < 0.1 for row in rows)
