"""Runs whose rewards come from a judge: on a server that is not always well, and again after a kill."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, metrics, run, start, succeed
from tests.judge_server import Heard, Said, between, by_length, serving
from tests.tiny import tiny_model, write_recipe

MANY = {"batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "micro_batch_tokens": 256}, "run.timeout_s": 120}


def recipe_with(folder: Path, url: str, options: Mapping[str, object], changes: Mapping[str, object]) -> Path:
    judge = {"url": url, "model": "wise", "timeout_s": 20, **options}
    return write_recipe(folder, tiny_model(), {"reward": {"judge": judge}, **MANY, **changes})


def points_of(response: str) -> int:
    return sum(map(ord, response)) % 11


def recorded(folder: Path, step: int = 1) -> list[dict[str, object]]:
    lines = (folder / f"runs/tiny/samples/step-{step:06d}.rank-0.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def of_judge(sample: Mapping[str, object]) -> Mapping[str, object]:
    return sample["details"]["judge"]  # type: ignore[index, no-any-return, call-overload]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_takes_its_rewards_from_a_judge_that_is_not_always_well(
    ranks: RankPool, tmp_path: Path, num_ranks: int
) -> None:
    def model(heard: Heard, number: int) -> Said | str:
        points = points_of(between(str(heard.fields["messages"][0]["content"]), "response"))  # type: ignore[index]
        if points < 3:
            return "I would rather not say."
        return Said(status=500) if number % 5 == 0 else f"It has its points.\nScore: {points}"

    with serving(model) as server:
        options = {"retries": 2}
        changes = {"guards": {"reward_failures_limit": None}, "run.recorded_prompts": 4}
        recipe = recipe_with(tmp_path, server.url, options, changes)
        succeed(ranks, tmp_path, "train", recipe, num_ranks=num_ranks)
    lines = metrics(tmp_path / "runs/tiny")
    samples = [sample for step in (1, 2) for sample in recorded(tmp_path, step)]
    assert [line["step"] for line in lines] == [1, 2]
    failed = [sample for sample in samples if not sample["is_valid"]]
    graded = [sample for sample in samples if sample["is_valid"]]
    assert failed
    assert graded
    assert all(points_of(str(sample["response"])) < 3 for sample in failed)
    assert all("cannot be read" not in str(of_judge(sample)) for sample in graded)
    assert all(sample["advantage"] == 0.0 for sample in failed)
    assert all(sample["reward"] == pytest.approx(points_of(str(sample["response"])) / 10) for sample in graded)
    assert of_judge(graded[0])["said"].startswith("It has its points.")  # type: ignore[attr-defined]
    assert 0 < lines[0]["judge/failed_share"] < 1
    assert lines[0]["judge/failed_share"] == lines[0]["reward/failed_share"]
    assert lines[0]["judge/requests"] > 1
    assert {"judge/latency_s", "judge/cached_share"} <= lines[0].keys()


def test_a_judge_that_never_answers_ends_the_run_with_its_error(ranks: RankPool, tmp_path: Path) -> None:
    with serving(by_length) as server:
        url = server.url
    outcome = run(ranks, tmp_path, "train", recipe_with(tmp_path, url, {"retries": 0}, {}))
    assert outcome.code != 0
    assert "guards.reward_failures_limit" in outcome.errors
    events = [json.loads(line) for line in (tmp_path / "runs/tiny/events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "reward_failed")
    assert "is it running?" in event["error"]


def test_a_killed_run_has_the_same_rewards_although_its_judge_has_changed_its_mind(tmp_path: Path) -> None:
    asked, answered, may_go_on = [], set(), threading.Event()

    def model(heard: Heard, number: int) -> str:
        asked.append(heard.question)
        if number >= 40:  # in a later step
            may_go_on.wait(60)
        answered.add(heard.question)
        return f"Score: {number % 11}"

    with serving(model) as server:
        changes = {
            "steps": 6,
            "checkpoint": {"every_steps": 1, "asynchronous": False},
            "run.recorded_prompts": 4,
            "loggers": [],
        }
        recipe = recipe_with(tmp_path, server.url, {"max_requests": 1}, changes)
        folder = tmp_path / "runs/tiny"
        process = start(tmp_path, "leaderless", "train", recipe)
        end = time.monotonic() + 120
        while len(asked) <= 40 and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.communicate()
        done = len(metrics(folder))
        kept = {json.loads(line)["key"]: line for line in (folder / "answers/rank-0.jsonl").read_text().splitlines()}
        known, num_asked = set(answered), len(asked)
        may_go_on.set()
        outcome = finish(start(tmp_path, "leaderless", "train", recipe))
        assert outcome.code == 0, outcome.errors
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [*range(1, 7)]
    again = [question for question in asked[num_asked:] if question in known]
    assert again == [], "only what had no answer yet is asked"
    after = {json.loads(line)["key"]: line for line in (folder / "answers/rank-0.jsonl").read_text().splitlines()}
    assert kept.items() <= after.items()
    assert lines[done]["judge/cached_share"] > 0
