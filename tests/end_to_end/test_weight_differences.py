"""Runs whose weights come as differences are those whose weights come whole, also after they are killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed.ranks import RankError, RankPool
from tests.loops import Runs, Seen, assert_same
from tests.tiny import tiny_model

STEPS, CHANNEL = 5, 1
SETTINGS = {
    "models": {"policy": {"path": tiny_model(num_layers=1), "compute_dtype": "bfloat16"}},
    "optimizer.learning_rate": 1e-5,
    "batch.updates_per_step": 1,
}
ENTRY = "weights(policy->0)"


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains in one folder for all tests."""
    return Runs(ranks, tmp_path_factory.mktemp("differences"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Seen:
    """A run that sends all numbers."""
    return runs(1, 1, CHANNEL, "whole", steps=STEPS, **SETTINGS, **{"rollout.weights": "whole"})


def sent(runs: Runs, name: str) -> Iterator[tuple[float, float, float | None]]:
    """Bytes, those of all numbers and the share of changed numbers, by step."""
    for row in runs.directory(name).read_metrics():
        if f"sent/bytes/{ENTRY}" in row:
            yield row[f"sent/bytes/{ENTRY}"], row[f"sent/whole_bytes/{ENTRY}"], row.get(f"sent/changed/{ENTRY}")


def test_a_run_is_the_same_with_fewer_bytes(runs: Runs, whole: Seen) -> None:
    assert_same(runs(1, 1, CHANNEL, "difference", steps=STEPS, **SETTINGS, **{"rollout.weights": "difference"}), whole)
    everything = [*sent(runs, "whole")]
    assert sum(num_bytes for num_bytes, _, _ in everything) > 0
    assert all((num_bytes, share) == (whole_bytes, None) for num_bytes, whole_bytes, share in everything)
    compared = [one for one in sent(runs, "difference") if one[2] is not None]
    assert compared
    for num_bytes, whole_bytes, share in compared:
        assert 0 < share < 0.5  # type: ignore[operator]
        assert num_bytes < whole_bytes


def test_a_run_within_a_machine_sends_all_numbers_by_default(runs: Runs, whole: Seen) -> None:
    assert_same(runs(1, 1, CHANNEL, "auto", steps=STEPS, **SETTINGS), whole)
    assert all(num_bytes == whole_bytes for num_bytes, whole_bytes, _ in sent(runs, "auto"))


def test_a_run_that_is_killed_around_another_layout_is_the_same(runs: Runs, whole: Seen) -> None:
    moved = {"rollout": {"ranks": "1"}, "reward": {"ranks": "0"}, "policy": {"ranks": "0"}}
    scheduled = {
        "schedule": {"replan_every_steps": 1, "layouts": {"other": moved}},
        "checkpoint.every_steps": 1,
        "checkpoint.asynchronous": False,
        "rollout.weights": "difference",
        **SETTINGS,
    }
    with pytest.raises(RankError):
        runs(1, 1, CHANNEL, "killed", None, STEPS, {2: "other"}, ("after", 1), **scheduled)
    after = runs(1, 1, CHANNEL, "killed", None, STEPS, {2: "other"}, **scheduled)
    first = min(after.trained)
    assert first > 2
    rest = {step: rows for step, rows in whole.trained.items() if step >= first}
    assert_same(after, Seen(rest, whole.weights))
