"""A generating pool is ahead of training by a fixed lag: the same samples on any ranks, and after any interruption."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.loops import (
    NUM_STEPS,
    PROMPTS,
    RESPONSES,
    UPDATES,
    Runs,
    Seen,
    Stop,
    assert_same,
    iterations,
    numbers,
    train,
)
from tests.tiny import tiny_model, write_recipe

from leaderless.data.batch import Batch
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.clock import total_seconds
from leaderless.observability.console import Display
from leaderless.planner import Channel, Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.agreement import StepEnd
from leaderless.worker.asynchronous.channels import Channels, Note
from leaderless.worker.build.process import open_worker
from leaderless.worker.chain import Chain
from leaderless.worker.checkpoint.shards import Manifest
from leaderless.worker.checkpoint.writer import CheckpointWriter
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.worker import Worker


def train_in_known_times(recipe_file: str, overrides: Sequence[str], seconds: Mapping[str, float]) -> float:
    """Be one worker of a run whose nodes take the given times; returns the seconds of all steps."""
    recipe = load_recipe(recipe_file, overrides).recipe
    place = RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))

    def padded(stage: Callable[[Batch, StageContext], Batch], limit_s: float) -> Callable[[Batch, StageContext], Batch]:
        def run(batch: Batch, context: StageContext) -> Batch:
            begin = time.monotonic()
            made = stage(batch, context)
            time.sleep(max(0.0, limit_s - (time.monotonic() - begin)))
            return made

        return run

    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        stages = worker.chain.stages
        known = {name: padded(stage, seconds[name]) for name, stage in stages.items() if name in seconds}
        worker.chain.stages = {**stages, **known}
        begin = time.monotonic()
        worker.run()
        return time.monotonic() - begin


def train_one_thing_within_another(recipe_file: str, overrides: Sequence[str]) -> Seen:
    """Be one worker of a run that only comes to its end if weights travel while both loops do something else.

    The rank that generates ends no iteration but the first before the next weights are there; the one that trains
    agrees on nothing at the end of an iteration before the weights of this iteration have been received.
    """
    walk, agree, send, sent = Chain.walk, Worker._agree, Channels._send_weights, set[int]()

    def walk_until_weights_are_there(chain: Chain) -> None:
        walk(chain)
        if chain._arrivals and chain._progress.step > 1:
            wait_until(chain.channels.weights.is_there, "the next weights have not come within an iteration")

    def send_and_note(
        channels: Channels, channel: Channel, iteration: int, act: Callable[[ProcessGroup], None]
    ) -> None:
        send(channels, channel, iteration, act)
        sent.add(iteration)

    def agree_when_weights_have_left(worker: Worker) -> StepEnd:
        if not worker._loop.lag:
            wait_until(lambda: worker.progress.step in sent, "weights wait for the end of the iteration")
        return agree(worker)

    with (
        patch.object(Chain, "walk", walk_until_weights_are_there),
        patch.object(Channels, "_send_weights", send_and_note),
        patch.object(Worker, "_agree", agree_when_weights_have_left),
    ):
        return train(recipe_file, overrides)


def train_and_note_meetings(recipe_file: str, overrides: Sequence[str]) -> dict[int, float]:
    """Be one worker of a run whose ranks meet after each step; returns when this one was there, by step.

    An iteration of the rank that generates takes a while, during which the weights arrive.
    """
    walk, take, finish = Chain.walk, Chain.take_weights, CheckpointWriter.finish
    there, finished = dict[int, float](), list[CheckpointWriter]()

    def walk_slowly(chain: Chain) -> None:
        walk(chain)
        if chain._arrivals and chain._progress.step > 1:
            wait_until(chain.channels.weights.is_there, "the next weights have not come within an iteration")
            time.sleep(0.3)

    def come(chain: Chain) -> Note:
        note = take(chain)
        there[chain._progress.trained] = time.monotonic()
        return note

    def finish_together(writer: CheckpointWriter) -> None:
        there.setdefault(1 + len(finished), time.monotonic())  # of the rank that generates, it is known
        finished.append(writer)
        finish(writer)

    with (
        patch.object(Chain, "walk", walk_slowly),
        patch.object(Chain, "take_weights", come),
        patch.object(CheckpointWriter, "finish", finish_together),
    ):
        train(recipe_file, overrides)
    return there


def wait_until(is_done: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end, problem
        time.sleep(0.002)


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains in one folder for all tests."""
    return Runs(ranks, tmp_path_factory.mktemp("lag"))


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Mapping[int, Seen]:
    """Undisturbed runs on 1 + 1 ranks, by lag."""
    return {lag: runs(1, 1, lag, f"plain-{lag}") for lag in (1, 2)}


@pytest.mark.parametrize("lag", [1, 2])
def test_each_iteration_is_sampled_with_the_weights_of_lag_plus_one_iterations_before(
    plain: Mapping[int, Seen], runs: Runs, lag: int
) -> None:
    wanted = {step: {max(0, step - 1 - lag) * UPDATES} for step in range(1, NUM_STEPS + 1)}
    samples = plain[lag].trained
    assert {step: {version for _, version in rows.values()} for step, rows in samples.items()} == wanted
    assert {len(rows) for rows in samples.values()} == {PROMPTS * RESPONSES}
    assert len({row for rows in samples.values() for row in rows}) == NUM_STEPS * PROMPTS * RESPONSES
    assert plain[lag].done == (NUM_STEPS, NUM_STEPS)
    journal = iterations(runs.directory(f"plain-{lag}"), "rollout-to-reward.jsonl")
    assert [line["iteration"] for line in journal] == list(range(1, NUM_STEPS + 1))
    for line in journal:
        (version,) = wanted[int(str(line["iteration"]))]
        first = (int(str(line["iteration"])) - 1) * PROMPTS
        assert line == {
            "iteration": line["iteration"],
            "groups": PROMPTS,
            "rows": PROMPTS * RESPONSES,
            "first_group": first,
            "last_group": first + PROMPTS - 1,
            "policy_versions": [version, version],
        }
    weights = iterations(runs.directory(f"plain-{lag}"), "policy-to-rollout.jsonl")
    assert weights == [{"iteration": k, "policy_version": k * UPDATES} for k in range(1, NUM_STEPS + 1)]


def test_the_seconds_of_each_rank_add_up_and_waits_say_whose_iteration_they_are_for(
    plain: Mapping[int, Seen], runs: Runs
) -> None:
    assert plain
    directory = runs.directory("plain-2")
    for log, pool, states in (("rollout", "0", {"generate", "evaluate"}), ("", "1", {"train", "wait_rows"})):
        lines = [json.loads(line) for line in directory.metrics_of(log).read_text().splitlines()]
        rows = [line for line in lines if f"seconds/{pool}/other" in line]
        assert len(rows) == NUM_STEPS
        spent = total_seconds(rows[1:])[pool]
        passed = rows[-1]["time_s"] - rows[0]["time_s"]
        # A line is written just after its seconds are taken.
        assert sum(spent.values()) == pytest.approx(passed, rel=0.02, abs=0.05)
        assert states <= spent.keys()
    events = json.loads((directory.traces / "rank-1.json").read_text())
    waits = [event["args"] for event in events if event["name"] == "wait(rollout->reward)"]
    wanted = [{"state": "wait_rows", "iteration": step, "ranks": "0"} for step in range(1, NUM_STEPS + 1)]
    assert [{**wait, "step": 0} for wait in waits] == [{"step": 0, **wait} for wait in wanted]


def test_weights_travel_while_both_loops_do_something_else(
    ranks: RankPool, plain: Mapping[int, Seen], runs: Runs
) -> None:
    recipe, overrides = runs.recipe(1, 1, 1), ["name=within", f"steps={NUM_STEPS}"]
    *_, seen = ranks.run(2, train_one_thing_within_another, str(recipe), overrides, init_group=False, timeout_s=120.0)
    assert_same(seen, plain[1])
    assert numbers(runs.directory("within")) == numbers(runs.directory("plain-1"))


def test_ranks_meet_only_where_those_that_generate_have_come_to_the_weights(ranks: RankPool, runs: Runs) -> None:
    """Else some would wait in a collective, which is not as patient, for iterations of others; rank 1 only grades."""
    layout = {node: {"ranks": number} for number, node in enumerate(("rollout", "reward", "policy"))}
    changes = {"layout": layout, "checkpoint": {"every_steps": 1, "asynchronous": False}}
    recipe, overrides = runs.recipe(1, 2, 1, **changes), ["name=meeting", "steps=3", "evaluation.every_steps=0"]
    came, *others = ranks.run(3, train_and_note_meetings, str(recipe), overrides, init_group=False, timeout_s=120.0)
    for met in others:
        assert met.keys() == came.keys() == {1, 2, 3}
        assert all(met[step] > came[step] for step in came)


def test_delays_at_random_change_no_bit(plain: Mapping[int, Seen], runs: Runs) -> None:
    assert_same(runs(1, 1, 2, "delayed", delays_of=0), plain[2])
    assert numbers(runs.directory("delayed")) == numbers(runs.directory("plain-2"))


@pytest.mark.thorough
@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize(("generating", "training"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_delays_at_random_change_no_bit_on_any_ranks(runs: Runs, generating: int, training: int, lag: int) -> None:
    name = f"{generating}-{training}-{lag}"
    undisturbed = runs(generating, training, lag, f"undisturbed-{name}")
    for seed in range(3):
        assert_same(runs(generating, training, lag, f"delayed-{name}-{seed}", delays_of=seed), undisturbed)
        assert numbers(runs.directory(f"delayed-{name}-{seed}")) == numbers(runs.directory(f"undisturbed-{name}"))


@pytest.mark.parametrize(
    ("generating", "training", "lag"), [(2, 2, 1), pytest.param(3, 1, 2, marks=pytest.mark.thorough)]
)
def test_samples_do_not_depend_on_the_number_of_ranks(
    plain: Mapping[int, Seen], runs: Runs, generating: int, training: int, lag: int
) -> None:
    seen = runs(generating, training, lag, f"on-{generating}-{training}")
    assert seen.trained == plain[lag].trained
    for name, weight in seen.weights.items():
        torch.testing.assert_close(weight, plain[lag].weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stop", [("rollout", 4), ("reward", 3)])
def test_a_run_that_a_signal_has_stopped_continues_to_the_same_bits(
    plain: Mapping[int, Seen], runs: Runs, stop: Stop
) -> None:
    name = f"stopped-{stop[0]}"
    before = runs(1, 1, 2, name, stop)
    step = before.done[1]
    assert 0 < step < NUM_STEPS
    checkpoint = runs.directory(name).checkpoints / f"step-{step:06d}"
    assert json.loads((checkpoint / "state.json").read_text())["step"] == step
    ahead = min(step + 2, NUM_STEPS)
    state = json.loads((checkpoint / "loop-rollout.json").read_text())
    assert state == {"iteration": ahead, "data_position": ahead * PROMPTS, "lag": 2}
    in_flight = sorted({file.name[5:11] for file in checkpoint.glob("rows-*")})
    assert in_flight == [f"{k:06d}" for k in range(step + 1, ahead + 1)]
    after = runs(1, 1, 2, name)
    assert_same(Seen(before.trained | after.trained, after.weights), plain[2])
    assert min(after.trained) == step + 1
    assert numbers(runs.directory(name)) == numbers(runs.directory("plain-2"))
    for file in ("rollout-to-reward.jsonl", "policy-to-rollout.jsonl"):
        assert iterations(runs.directory(name), file) == iterations(runs.directory("plain-2"), file)


def test_a_run_of_fewer_steps_continues_as_if_it_had_been_longer_from_the_beginning(
    plain: Mapping[int, Seen], runs: Runs
) -> None:
    before = runs(1, 1, 2, "longer", steps=4)
    assert before.done == (4, 4)
    after = runs(1, 1, 2, "longer")
    assert min(after.trained) == 3, "the two steps whose weights the next iterations need are repeated"
    assert {step: after.trained[step] for step in (3, 4)} == {step: before.trained[step] for step in (3, 4)}
    assert_same(Seen(before.trained | after.trained, after.weights), plain[2])
    assert numbers(runs.directory("longer")) == numbers(runs.directory("plain-2"))


def test_a_stopped_run_continues_on_other_ranks(plain: Mapping[int, Seen], runs: Runs) -> None:
    before = runs(2, 1, 1, "moved", ("rollout", 3))
    after = runs(1, 2, 1, "moved")
    assert before.trained | after.trained == plain[1].trained


def test_both_loops_are_at_work_at_the_same_time(plain: Mapping[int, Seen], runs: Runs) -> None:
    assert plain
    spans: list[list[tuple[float, float]]] = []
    for rank, names in ((0, {"rollout"}), (1, {"reward", "old", "advantage", "policy"})):
        events = json.loads((runs.directory("plain-2").traces / f"rank-{rank}.json").read_text())
        spans.append([(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] in names])
    generating, training = spans
    overlaps = [min(end, other_end) - max(begin, other) for begin, end in generating for other, other_end in training]
    assert max(overlaps) > 0


def test_evaluations_are_those_of_the_step_that_they_are_logged_under(plain: Mapping[int, Seen], runs: Runs) -> None:
    assert plain
    for lag in (1, 2):
        rows = numbers(runs.directory(f"plain-{lag}"))
        assert [row["step"] for row in rows if "evaluation/mean@1" in row] == [0, 2, 4, 6]
        assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
        assert all("rollout/response_tokens" in row and "policy/loss" in row for row in rows[1:])


def test_a_checkpoint_knows_the_numbers_of_both_loops(plain: Mapping[int, Seen], runs: Runs) -> None:
    assert plain
    metrics = Manifest.read(runs.directory("plain-1").checkpoints / f"step-{NUM_STEPS:06d}").metrics
    assert {"policy/loss", "evaluation/mean@1"} <= metrics.keys()


@pytest.mark.thorough
def test_a_step_takes_as_long_as_the_slower_loop(ranks: RankPool, tmp_path: Path) -> None:
    """Sleeping nodes, so that other work on the machine matters little."""
    rollout_s, update_s, steps = 3.0, 2.0, 5
    layout = {name: {"ranks": str(int(name == "policy"))} for name in ("rollout", "policy")}
    wanted = {0: steps * (rollout_s + update_s), 1: steps * rollout_s + update_s}
    for lag, seconds in wanted.items():
        channels = {"channels": {"rollout": {"capacity": lag}}} if lag else {}
        recipe = write_recipe(tmp_path, tiny_model(), {"layout": layout, **channels})
        times = {"rollout": rollout_s, "policy": update_s}
        overrides = [f"name=lag-{lag}", f"steps={steps}"]
        took = max(ranks.run(2, train_in_known_times, str(recipe), overrides, times, init_group=False))
        print(f"lag {lag}: {took:.1f} s, promised {seconds:.1f} s")
        assert seconds <= took <= 1.1 * seconds
