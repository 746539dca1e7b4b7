"""Bodies that play on ranks of their own: in turns with training, or ahead of it by a fixed lag."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import succeed
from tests.end_to_end.test_bodies import numbers
from tests.small_bodies import body_recipe

from leaderless.config import RecipeError
from leaderless.observability.run_directory import read_lines

STEPS, UPDATES = 3, 2
POOLS = {name: {"ranks": 0} for name in ("rollout",)} | {
    name: {"ranks": 1} for name in ("reward", "old", "advantage", "samples", "policy")
}
LOSSES = ("policy/loss", "policy/grad_norm", "reward/mean", "body/success")


def train(
    ranks: RankPool, folder: Path, num_ranks: int, *overrides: str, **changes: object
) -> list[Mapping[str, float]]:
    """The numbers of a run in a folder."""
    folder.mkdir(exist_ok=True)
    given = {"batch.updates_per_step": UPDATES, "checkpoint": {"every_steps": 1}, **changes}
    body_recipe(folder, steps=STEPS, **given)  # type: ignore[arg-type]
    succeed(ranks, folder, "train", "recipe.yaml", *overrides, num_ranks=num_ranks)
    return numbers(folder)


def only(rows: list[Mapping[str, float]], names: tuple[str, ...]) -> list[dict[str, float]]:
    return [{name: row[name] for name in names if name in row} for row in rows]


def test_pools_change_no_number(ranks: RankPool, tmp_path: Path) -> None:
    alone = train(ranks, tmp_path / "alone", 1)
    pools = train(ranks, tmp_path / "pools", 2, layout=POOLS)
    for row, other in zip(only(pools, LOSSES), only(alone, LOSSES), strict=True):
        assert row == pytest.approx(other, abs=2e-5)


def test_a_lag_is_kept_and_a_stopped_run_continues_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """The weights of each iteration are those of `lag + 1` iterations before, which bounds how stale samples are."""
    lag = 1
    given = {"layout": POOLS, "channels": {"rollout": {"capacity": lag}}}
    whole = train(ranks, tmp_path / "whole", 2, **given)
    journal = tmp_path / "whole/runs/line/journal/rollout-to-reward.jsonl"
    versions = [line["policy_versions"] for line in read_lines(journal, "iteration")]
    assert versions == [[max(0, k - lag) * UPDATES] * 2 for k in range(STEPS)]
    trained = [row["staleness/oldest"] for row in whole if "staleness/oldest" in row]
    assert max(trained) == lag * UPDATES
    train(ranks, tmp_path / "stopped", 2, "steps=2", **given)
    assert train(ranks, tmp_path / "stopped", 2, **given) == whole


def test_sac_plays_ahead_of_its_learner(ranks: RankPool, tmp_path: Path) -> None:
    pools = {"act": {"ranks": 0}, "remember": {"ranks": 1}, "policy": {"ranks": 1}}
    small = {"batch_size": 16, "hidden_size": 8, "num_heads": 3, "first_decisions": 8, "critic_updates": 1}
    given = {
        "workflow": "sac",
        "models.policy.body": {"type": "squashed", "options": {"chunk": 2, "hidden_size": 8}},
        "algorithm": {"sac": small},
        "batch.updates_per_step": 1,
        "layout": pools,
        "channels": {"act": {"capacity": 1}},
    }
    found = train(ranks, tmp_path / "run", 2, **given)
    assert max(row.get("sac/updates", 0) for row in found) > 0


def test_continuous_generation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="channels: continuous cannot be combined with `body`"):
        body_recipe(tmp_path, layout=POOLS, channels={"rollout": {"capacity": 1, "mode": "continuous"}})  # type: ignore[arg-type]
