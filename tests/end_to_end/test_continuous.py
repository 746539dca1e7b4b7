"""Ranks that generate continuously: the bound holds for every token, and a run can be done again exactly."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from random import Random

import pytest
from tests.distributed.ranks import RankPool
from tests.loops import NUM_STEPS, PROMPTS, RESPONSES, UPDATES, Runs, Seen, Stop, assert_same, numbers

from leaderless.environments.protocol import Environment, EpisodeFailed, Observation, Task, Turn

CHANNEL = {"capacity": 1, "mode": "continuous"}
FEW_STEPS = 4
EPISODES: dict[str, object] = {
    "environment": {"type": f"{__name__}:Echo", "max_turns": 4, "max_episode_tokens": 30, "concurrency": 6},
    "reward": {},
    "data.max_prompt_tokens": 8,
    "batch.micro_batch_tokens": 128,
}


class Echo(Environment):
    """Says back the last character it was told, with a number that nobody can foretell, after a time of its own."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.is_gone = is_gone

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        if self.is_gone:
            raise EpisodeFailed("there is no environment any more")
        self.chance, self.turn = Random(), 0
        return f"{task['question']}{self.chance.randrange(10)}"

    def act(self, text: str) -> Turn:
        time.sleep(0.05 * self.chance.random())
        self.turn += 1
        done = self.turn == 1 + ord(text[:1] or "0") % 3
        return Turn(f"{text[-1:]}{self.chance.randrange(10)}", reward=self.chance.random(), done=done)


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


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize(("generating", "training"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_what_is_delayed_at_random_can_be_followed(runs: Runs, generating: int, training: int, capacity: int) -> None:
    channel = {**CHANNEL, "capacity": capacity}
    for seed in range(2):
        name = f"{generating}-{training}-{capacity}-{seed}"
        delayed = runs(generating, training, channel, name, delays_of=seed)
        assert len({row for rows in delayed.trained.values() for row in rows}) == NUM_STEPS * PROMPTS * RESPONSES
        assert all(row["staleness/oldest"] <= capacity * UPDATES for row in numbers(runs.directory(name))[1:])
        again = runs(generating, training, channel, f"{name}-again", delays_of=9, **{"run.follow": name})
        assert_same(again, delayed)
        assert lines(runs, f"{name}-again") == lines(runs, name)


def test_episodes_are_played_across_updates_and_can_be_followed(runs: Runs) -> None:
    channel = {**CHANNEL, "stragglers": "defer", "max_staleness": 2 * UPDATES}
    played = runs(2, 1, channel, "played", steps=FEW_STEPS, **EPISODES)
    groups = {sample >> 16 for rows in played.trained.values() for sample in rows}
    assert groups == set(range(FEW_STEPS * PROMPTS))
    kinds = {event[1] for line in lines(runs, "played") for event in line["events"]}  # type: ignore[attr-defined]
    assert {"ask", "end", "weights"} <= kinds
    followed = {"environment.options": {"is_gone": True}, "run.follow": "played"}
    again = runs(2, 1, channel, "played-again", steps=FEW_STEPS, **EPISODES, **followed)
    assert_same(again, played)
    assert lines(runs, "played-again") == lines(runs, "played")
    one, other = (
        [{k: v for k, v in row.items() if not k.endswith(("_s", "_busy"))} for row in numbers(runs.directory(name))]
        for name in ("played", "played-again")
    )
    assert one == other
    graded, graded_again = (
        [json.loads(line)["reward"] for file in files for line in file.read_text().splitlines()]
        for files in (
            sorted((runs.directory(name).path / "samples").glob("evaluation-*")) for name in ("played", "played-again")
        )
    )
    assert graded == graded_again
    assert any(reward % 1 for reward in graded), "the environment gave rewards by chance"


@pytest.mark.parametrize(
    ("name", "stragglers", "stop", "ranks_after"),
    [
        pytest.param("stopped", "wait", ("rollout", 3), (2, 1), marks=pytest.mark.thorough),  # the other three do both
        ("stopped-by-training", "defer", ("reward", 3), (2, 1)),
        ("skewed", "wait", ("reward", 2), (2, 1)),
        ("moved", "cancel", ("rollout", 4), (1, 2)),
    ],
)
def test_a_run_that_a_signal_has_stopped_loses_no_prompt_and_repeats_none(
    runs: Runs, name: str, stragglers: str, stop: Stop, ranks_after: tuple[int, int]
) -> None:
    channel = {"capacity": 2, "max_staleness": 3 * UPDATES, "mode": "continuous", "stragglers": stragglers}
    before = runs(2, 1, channel, name, stop)
    assert 0 < before.done[1] < NUM_STEPS
    after = runs(*ranks_after, channel, name)
    assert min(after.trained) == before.done[1] + 1
    trained = [row for rows in (*before.trained.values(), *after.trained.values()) for row in rows]
    assert len(trained) == len({*trained}) == NUM_STEPS * PROMPTS * RESPONSES
    assert {row >> 16 for row in trained} == set(range(NUM_STEPS * PROMPTS))
    assert [row["step"] for row in numbers(runs.directory(name))] == list(range(NUM_STEPS + 1))


def test_a_run_that_was_stopped_can_be_followed_and_grades_meanwhile(runs: Runs) -> None:
    channel = {"capacity": 2, "mode": "continuous", "cache": "recompute"}
    layout = {
        "rollout": {"ranks": "0-1"},
        "reward": {"ranks": "0-1"},
        "advantage": {"ranks": "2"},
        "policy": {"ranks": "2"},
    }
    graded = {"layout": layout, "reward": {"tests.unit.reward_functions:slowly": 1.0}, "run.reward_processes": 1}
    before = runs(2, 1, channel, "graded", ("policy", 2), FEW_STEPS, **graded)
    after = runs(2, 1, channel, "graded", None, FEW_STEPS, **graded)
    events = [event for line in lines(runs, "graded") for event in line["events"]]  # type: ignore[attr-defined]
    assert len([event for event in events if event[1] == "graded"]) >= FEW_STEPS * PROMPTS
    again = runs(2, 1, channel, "graded-again", None, FEW_STEPS, **graded, **{"run.follow": "graded"})
    assert_same(again, Seen(before.trained | after.trained, after.weights))


def test_a_run_in_which_a_rank_helps_can_be_stopped_and_followed(runs: Runs) -> None:
    shared = {"portions": [3, 1], "helpers": {1: 2}}
    channel = {"capacity": 2, "mode": "continuous", "cache": "recompute", **shared}
    before = runs(2, 1, channel, "interrupted", ("reward", 2), FEW_STEPS)
    after = runs(2, 1, channel, "interrupted", None, FEW_STEPS)
    again = runs(2, 1, channel, "not-interrupted", None, FEW_STEPS, **{"run.follow": "interrupted"})
    assert_same(again, Seen(before.trained | after.trained, after.weights))
    groups = [len(line["groups"]) for line in lines(runs, "not-interrupted")]  # type: ignore[arg-type]
    assert groups == [3] * FEW_STEPS + [1] * FEW_STEPS


def test_the_only_rank_that_generates_may_share_the_device_of_the_one_that_trains(runs: Runs) -> None:
    seen = runs(1, 1, {**CHANNEL, "helpers": {0: 1}}, "sharing", steps=3)
    assert seen.done == (3, 3)
    versions = {step: {version for _, version in samples.values()} for step, samples in seen.trained.items()}
    assert max(versions[3]) >= UPDATES, "weights have come to the rank that generates"
    assert all(row["staleness/oldest"] <= UPDATES for row in numbers(runs.directory("sharing"))[1:])
