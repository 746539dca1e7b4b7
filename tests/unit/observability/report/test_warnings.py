"""Warnings appear above their threshold and not at it."""

from __future__ import annotations

import random

import pytest
from tests.unit.observability.report.runs import Page, replace_metric, sample_rows, titles, write_lines

from leaderless.observability.report.checks import review
from leaderless.observability.report.page import render_report
from leaderless.observability.report.run_files import read_run

WARNINGS = {
    "Values that are not finite numbers": ("policy/loss", lambda bad: float("nan") if bad else 0.0),
    "Rewards that could not be computed": ("reward/failed", lambda bad: 1 if bad else 0),
    "Engine and trainer disagree about log-probs": ("mismatch/abs_mean", lambda bad: 0.051 if bad else 0.05),
    "Most groups teach nothing": ("group/no_signal", lambda bad: 0.51 if bad else 0.5),
    "Many responses are cut off": ("rollout/truncated", lambda bad: 0.21 if bad else 0.2),
    "The policy's entropy has collapsed": ("policy/entropy", lambda bad: 0.09 if bad else 0.1),
    "The gradient norm spikes": ("policy/grad_norm", lambda bad: 10.1 if bad else 10.0),
}


OF_EPISODES = {
    "Many episodes fail": ("episode/failed", 52, 51),
    "Many episodes are cut": ("episode/cut", 0.21, 0.2),
    "Conversations are read again in each turn": ("rollout/prefix_hits", 0.49, 0.5),
    "Many calls of tools cannot be read": ("tool/misread", 0.11, 0.1),
}


@pytest.mark.parametrize("title", OF_EPISODES)
def test_a_warning_about_episodes_appears_above_its_threshold_and_not_at_it(run, title):
    (run / "config.yaml").write_text("batch: {prompts_per_step: 128, responses_per_prompt: 8}\n")
    metric, bad, good = OF_EPISODES[title]
    for value, wanted in ((good, []), (bad, [title])):
        rows = [{"step": step, metric: value, "failure/deadline": 0.25, "failure/policy": 0.5} for step in range(1, 9)]
        write_lines(run / "metrics.jsonl", rows)
        assert titles(run) == wanted
    if metric == "episode/failed":
        assert review(read_run(run)).findings[0].seen == (
            "5% of the episodes in steps 7 to 8. Kinds of failures then: deadline 25%."
        )


@pytest.mark.parametrize("title", WARNINGS)
def test_a_warning_appears_above_its_threshold_and_not_at_it(run, title):
    metric, value = WARNINGS[title]
    before = 1.0 if metric in {"policy/entropy", "policy/grad_norm"} else value(False)
    for bad in (False, True):
        replace_metric(run, metric, lambda step, bad=bad: value(bad) if step > 30 else before)
        if metric == "policy/grad_norm":
            replace_metric(run, metric, lambda step, bad=bad: value(bad) if step == 31 else before)
        assert titles(run) == [title] * bad
    page = Page(render_report(run))
    assert title in page.text
    assert "Nothing to worry about" not in page.text
    assert "6 checks passed, 4 could not be made" in page.text


def test_failed_rewards_come_with_count_and_example(run):
    rows = sample_rows(7, 1.0, random.Random(0))
    rows[3] |= {"is_valid": False, "reward": 0.0, "details": {"math": {"error": "TimeoutError: <10 s>"}}}
    write_lines(run / "samples/step-000007.jsonl", rows)
    replace_metric(run, "reward/failed", lambda step: 3 if step in {7, 9} else 0)
    finding = review(read_run(run)).findings[0]
    assert finding.seen == "6 responses in 2 of 40 logged steps, the last at step 9."
    assert finding.example == "step 7, math: TimeoutError: <10 s>"
    assert "step 7, math: TimeoutError: <10 s>" in Page(render_report(run)).text
    failed = [sample for sample in read_run(run).samples.steps[6].groups[0].samples if sample.state == "failed"]
    assert [sample.reward for sample in failed] == [None]


@pytest.mark.parametrize("written", ["NaN", "-Infinity", "null", "1e999", "1" + "0" * 400])
def test_a_value_that_is_not_finite_is_a_gap_and_a_warning(run, written):
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "policy/loss": 0.5}}\n{{"step": 2, "policy/loss": {written}}}\n')
    assert titles(run) == ["Values that are not finite numbers"]
    page = Page(render_report(run))
    assert page.data("chart-data")["chart-0"]["traces"][0]["values"] == [0.5, None]
    assert "policy/loss (first at step 2)" in page.text


def test_a_gradient_after_steps_without_signal_is_no_spike(run):
    replace_metric(run, "policy/grad_norm", lambda step: 0.3 if step > 35 else 0.0)
    assert titles(run) == []


def test_what_a_run_does_not_log_is_not_called_fine(run):
    losses = [{"step": s, "time_s": s, "policy/loss": 2.0 - s} for s in (1, 2)]
    write_lines(run / "metrics.jsonl", losses)
    outcome = review(read_run(run))
    assert (len(outcome.findings), len(outcome.passed), len(outcome.not_made)) == (0, 1, 10)
    text = Page(render_report(run)).text
    assert "1 check passed, 10 could not be made" in text
    assert "Loss 0 −1 since step 1 (1)" in text
