"""The browser of samples: equal responses once, tokens one by one, held-out prompts."""

from __future__ import annotations

import random

from tests.unit.observability.report.runs import EVIL, Page, sample_rows, token_view, write_lines

from leaderless.observability.report import samples as report_samples
from leaderless.observability.report.page import render_report
from leaderless.observability.report.run_files import read_run
from leaderless.observability.report.samples import JudgeView, read_samples, read_step


def step_of(rows):
    return read_step(1, rows, JudgeView())


def test_equal_responses_to_a_prompt_are_shown_once_with_their_number():
    row = sample_rows(1, 1.0, random.Random(0))[0]
    rows = [row | {"sample_id": f"{i}", "response": "same" if i < 14 else "other"} for i in range(16)]
    step = step_of([*rows, row | {"sample_id": "16", "response": "same", "reward": 0.5}])
    assert [(s.response, s.count) for s in step.groups[0].samples] == [("same", 14), ("other", 2), ("same", 1)]
    assert step.num_samples == step.num_recorded == 17


def test_images_are_shown_with_their_prompt_if_they_are_in_the_file():
    first, second = sample_rows(1, 1.0, random.Random(0))[:2]
    urls = ["data:image/png;base64,AA==", "https://example.org/a.png", "data:text/html;base64,AA==", 7]
    step = step_of([first | {"group_id": 5}, second | {"group_id": 5, "images": urls}, first | {"group_id": 6}])
    assert {group.group_id: group.images for group in step.groups} == {"5": ("data:image/png;base64,AA==",), "6": ()}


def test_equal_responses_of_two_roles_are_apart():
    row = sample_rows(1, 1.0, random.Random(0))[0]
    step = step_of([row | {"sample_id": role, "role": role} for role in ("solver", "judge")])
    assert [(sample.role, sample.count) for sample in step.groups[0].samples] == [("solver", 1), ("judge", 1)]
    assert step_of([row]).groups[0].samples[0].role == ""


def test_equal_responses_to_other_prompts_are_apart():
    row = sample_rows(1, 1.0, random.Random(0))[0]
    step = step_of([row | {"sample_id": "a"}, row | {"sample_id": "b", "group_id": 5, "prompt": "another"}])
    assert [[sample.count for sample in group.samples] for group in step.groups] == [[1], [1]]


def test_tokens_come_with_log_probs_and_mask():
    row = sample_rows(1, 1.0, random.Random(0))[0]
    view = {
        "total": 9,
        "text": ["a", "tool", "b"],
        "rollout": [-0.5, None, -2],
        "old": [-0.6, None, -2],
        "mask": [1, 0, 1],
    }
    step = step_of([row | {"sample_id": 7, "tokens": view}])
    assert step.tokens == {"7": view}


def test_tokens_of_another_shape_are_left_out():
    row = sample_rows(1, 1.0, random.Random(0))[0]
    views = [None, 3, [], {"text": "abc", "rollout": [1, 2, 3]}, {"text": ["a"], "rollout": [1, 2]}, {"rollout": [0.5]}]
    rows = [row | {"sample_id": i, "response": f"{i}", "tokens": view} for i, view in enumerate(views)]
    assert step_of(rows).tokens == {}
    bad = {"text": ["x" * 1000, 5, None], "rollout": ["x", float("nan"), -1.0], "total": "many"}
    (tokens,) = step_of([row | {"tokens": bad}]).tokens.values()
    assert tokens["rollout"] == [None, None, -1.0]
    assert [len(text) for text in tokens["text"]] == [80, 1, 0]


def test_tokens_of_the_last_steps_are_kept_where_not_all_fit(run, monkeypatch):
    for step in (1, 2, 40):
        rows = sample_rows(step, 1.0, random.Random(0))
        write_lines(run / f"samples/step-{step:06d}.jsonl", [row | {"tokens": token_view("abc")} for row in rows])
    size = len(read_samples(run / "samples", JudgeView()).steps[-1].tokens)
    assert size
    per_step = report_samples._size_bytes(dict(read_samples(run / "samples", JudgeView()).steps[-1].tokens))
    monkeypatch.setattr(report_samples, "TOKEN_BUDGET_BYTES", int(2.5 * per_step))
    steps = {step.step: step for step in read_samples(run / "samples", JudgeView()).steps}
    assert [len(steps[step].tokens) for step in (1, 2, 40)] == [0, size, size]


def test_held_out_samples_are_on_the_page(run):
    row = sample_rows(20, 1.0, random.Random(0))[0] | {"prompt": "held out?", "tokens": token_view(EVIL)}
    write_lines(run / "samples/evaluation-000020.rank-0.jsonl", [row])
    files = read_run(run)
    assert [step.step for step in files.held_out.steps] == [20]
    assert files.samples.num_recorded_steps == 40
    page = Page(render_report(run))
    (step,) = page.data("held-out-data")
    assert step["groups"][0]["prompt"] == "held out?"
    assert next(iter(step["tokens"].values()))["text"] == [EVIL[:80]]
