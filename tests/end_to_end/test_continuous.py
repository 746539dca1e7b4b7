"""Ranks that generate continuously: the bound holds for every token, and a run can be done again exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from tests.distributed.ranks import RankPool
from tests.loops import NUM_STEPS, PROMPTS, RESPONSES, UPDATES, Runs, Seen, assert_same, numbers

CHANNEL = {"capacity": 1, "mode": "continuous"}


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains in one folder for all tests."""
    return Runs(ranks, tmp_path_factory.mktemp("continuous"))


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Seen:
    """An undisturbed run."""
    return runs(2, 1, CHANNEL, "plain")


def lines(runs: Runs, name: str) -> list[Mapping[str, object]]:
    folder = runs.directory(name).journal
    return [json.loads(line) for file in sorted(folder.glob("*shard*")) for line in file.read_text().splitlines()]


def test_every_prompt_is_trained_once_and_within_the_bound(plain: Seen, runs: Runs) -> None:
    assert plain.done == (NUM_STEPS, NUM_STEPS)
    assert {len(rows) for rows in plain.trained.values()} == {PROMPTS * RESPONSES}
    assert len({row for rows in plain.trained.values() for row in rows}) == NUM_STEPS * PROMPTS * RESPONSES
    rows = numbers(runs.directory("plain"))
    assert [row["step"] for row in rows if "evaluation/mean@1" in row] == [0, 2, 4, 6]
    assert all("rollout/response_tokens" in row and "policy/loss" in row for row in rows[1:])
    assert all(row["staleness/oldest"] <= UPDATES for row in rows[1:])


def test_a_run_that_is_followed_is_the_same_to_the_last_bit(plain: Seen, runs: Runs) -> None:
    again = runs(2, 1, CHANNEL, "again", **{"run.follow": "plain"})
    assert_same(again, plain)
    assert lines(runs, "again") == lines(runs, "plain")
    assert numbers(runs.directory("again")) == numbers(runs.directory("plain"))
