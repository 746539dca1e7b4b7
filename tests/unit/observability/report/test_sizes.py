"""Long runs and long texts stay small on the page, which says so."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observability.report.runs import Page, metrics_row, sample_rows, write_lines

from leaderless.observability.report.curves import MAX_POINTS, Series, mean_per_run, thin
from leaderless.observability.report.page import render_report
from leaderless.observability.report.run_files import read_run
from leaderless.observability.report.samples import (
    BUDGET_BYTES,
    IMAGE_BUDGET_BYTES,
    MAX_TEXT_CHARACTERS,
    JudgeView,
    read_samples,
)


def test_thinned_curve_keeps_ends_and_spikes():
    values = [math.sin(i / 50) for i in range(10_000)]
    values[1234], values[7777] = 99.0, -99.0
    series = thin(Series(tuple(range(10_000)), tuple(values)))
    assert 1000 < len(series.steps) <= MAX_POINTS
    assert (series.steps[0], series.steps[-1]) == (0, 9_999)
    assert {(1234, 99.0), (7777, -99.0)} <= set(zip(series.steps, series.values, strict=True))
    assert list(series.steps) == sorted(set(series.steps))
    assert all(values[step] == value for step, value in zip(series.steps, series.values, strict=True))


def test_thinning_leaves_short_curves_alone_and_shows_long_gaps():
    short = Series(tuple(range(MAX_POINTS)), (0.5,) * MAX_POINTS)
    assert thin(short) is short
    gap = Series(tuple(range(100)), tuple(None if 40 <= i < 60 else 1.0 for i in range(100)))
    assert None in thin(gap, 20).values


@given(
    values=st.lists(st.one_of(st.none(), st.integers(-3, 3), st.floats(-9, 9)), min_size=1, max_size=60),
    max_points=st.integers(4, 20),
)
def test_thinned_curve_is_that_of_a_loop(values, max_points):
    series = Series(range(0, 2 * len(values), 2), values)
    kept, num_runs = {0, len(values) - 1}, (max_points - 2) // 2
    for run in range(num_runs):
        places = range(1 + run * (len(values) - 2) // num_runs, 1 + (run + 1) * (len(values) - 2) // num_runs)
        finite = [(values[place], place) for place in places if values[place] is not None]
        kept |= {min(finite)[1], max(finite)[1]} if finite else {places[0]} if places else set()
    expected = (
        series if len(values) <= max_points else Series(*zip(*((2 * i, values[i]) for i in sorted(kept)), strict=True))
    )
    assert thin(series, max_points) == expected


@given(
    points=st.lists(
        st.dictionaries(st.integers(0, 30), st.one_of(st.none(), st.floats(-9, 9))), min_size=1, max_size=3
    ),
    max_runs=st.integers(1, 9),
)
def test_stacked_means_are_those_of_a_loop(points, max_runs):
    series = {str(name): Series(sorted(one), [one[step] for step in sorted(one)]) for name, one in enumerate(points)}
    steps = sorted(set().union(*points))
    count = min(max_runs, len(steps))
    runs = [steps[run * len(steps) // count : (run + 1) * len(steps) // count] for run in range(count)]
    first, means = mean_per_run(series, max_runs)
    assert first == [run[0] for run in runs]
    for name, one in enumerate(points):
        expected = [sum(one.get(step) or 0.0 for step in run) / len(run) for run in runs]
        assert means[str(name)] == pytest.approx(expected)


def test_page_of_a_long_run_stays_small_and_says_so(run):
    num_steps = 6000
    rng = random.Random(0)
    write_lines(run / "metrics.jsonl", [metrics_row(step, num_steps, rng) for step in range(num_steps)])
    page = Page(render_report(run))
    for chart in page.data("chart-data").values():
        lengths = [len(trace["steps"]) for trace in chart.get("traces", [chart])]
        assert max(lengths) <= MAX_POINTS
    assert "Curves of more than 2,000 points are thinned" in page.text
    assert "Each point is a mean over neighboring steps" in page.text


def test_stacked_means_by_hand():
    series = {"a": Series((1, 2, 3, 4), (1.0, 3.0, 5.0, None)), "b": Series((4,), (8.0,))}
    assert mean_per_run(series, 2) == ([1, 3], {"a": [2.0, 2.5], "b": [0.0, 4.0]})
    assert mean_per_run({}, 2) == ([], {})


def size_on_page(samples) -> int:
    return sum(step.size_bytes for step in samples.steps)


@pytest.mark.parametrize("budget", [30_000, 60_000, 150_000])
def test_samples_fill_the_budget_with_evenly_spread_steps(run, budget):
    samples = read_samples(run / "samples", JudgeView(), budget)
    steps = [step.step for step in samples.steps]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert budget / 2 < size_on_page(samples) <= budget
    assert (steps[0], steps[-1], samples.num_recorded_steps) == (1, 40, 40)
    assert max(gaps) - min(gaps) <= 1
    assert all(sum(one.count for one in group.samples) == 8 for step in samples.steps for group in step.groups)


def test_page_says_how_many_steps_it_shows(run, monkeypatch):
    monkeypatch.setattr(read_run, "__defaults__", (None, (60_000, 60_000)))
    page = Page(render_report(run))
    assert f"40 steps were recorded; {len(page.data('sample-data'))} of them" in page.text
    assert "to stay within 0.06 MB" in page.text


def test_steps_that_are_too_large_are_cut_between_samples(run):
    for step in (1, 40):
        rows = sample_rows(step, 1.0, random.Random(0))
        rows = [row | {"response": "x" * 15_000 + "&" * 4_000} for row in rows]
        write_lines(run / f"samples/step-{step:06d}.jsonl", rows)
    samples = read_samples(run / "samples", JudgeView(), 400_000)
    assert [step.step for step in samples.steps] == [1, 40]
    assert 250_000 < size_on_page(samples) <= 400_000
    assert [step.num_recorded for step in samples.steps] == [32, 32]
    assert 0 < sum(step.num_samples for step in samples.steps) == 64 - samples.num_left_out < 64


def test_a_very_long_text_is_cut_and_says_so(run):
    row = sample_rows(40, 1.0, random.Random(0))[0] | {"response": "y" * (MAX_TEXT_CHARACTERS + 1500)}
    write_lines(run / "samples/step-000040.jsonl", [row])
    response = read_run(run).samples.steps[-1].groups[0].samples[0].response
    assert response == "y" * MAX_TEXT_CHARACTERS + "\n[… 1,500 more characters are in the file]"
    assert size_on_page(read_run(run).samples) < BUDGET_BYTES


@pytest.mark.parametrize("num_bytes", [1_000, 60_000])
def test_images_of_all_steps_stay_within_their_own_budget(run, num_bytes):
    url = "data:image/png;base64," + "A" * num_bytes
    for step in range(1, 41):
        rows = sample_rows(step, 1.0, random.Random(0))
        rows = [row | {"response": f"{step} {place}", "images": [url]} for place, row in enumerate(rows)]
        write_lines(run / f"samples/step-{step:06d}.jsonl", rows)
    steps = read_samples(run / "samples", JudgeView()).steps
    shown = [sum(len(group.images) for group in one.groups) for one in steps]
    assert IMAGE_BUDGET_BYTES / 2 < sum(shown) * len(url) <= IMAGE_BUDGET_BYTES
    assert (steps[0].step, steps[-1].step) == (1, 40)
    assert all(len(group.images) > 0 for one in steps for group in one.groups)
    assert all(one.num_samples == one.num_recorded for one in steps), "only images are left out"
    assert ("and within 1 MB of images" in Page(render_report(run)).text) == (len(steps) < 40)
