"""The page has all its parts, and nothing from a run is ever taken for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re

import pytest
from tests.unit.observability.report.runs import EVIL, Page, replace_metric, sample_rows, spoil_with, write_lines

from leaderless.observability.report.charts import MAX_OWN_CHARTS, charts_of
from leaderless.observability.report.page import render_report, write_report
from leaderless.observability.report.run_files import read_run
from leaderless.observability.report.unchecked_values import clean_svg


def test_page_of_a_healthy_run_has_all_its_parts(run):
    page = Page(render_report(run))
    assert page.count("h1") == 1
    assert {attributes.get("id") for tag, attributes in page.elements if tag == "section"} == {
        "checks", "curves", "time", "samples", "plan", "recipe",
    }  # fmt: skip
    for text in ("qwen3-gsm8k", "Workflow grpo", "World size 8", "Last step 40 of 40 planned", "Duration 14 min"):
        assert text in page.text
    assert "Nothing to worry about" in page.text
    assert "7 checks passed, 4 could not be made" in page.text
    assert "What is missing" not in page.text
    assert "reference log_probs reference rollout ranks 0-3 dp=4" in page.text
    assert "rollout → policy policy_versions, prompt_tokens" in page.text
    assert "peak on the fullest rank on a cpu, estimated" in page.text
    assert "responses_per_prompt: 8" in page.text
    assert page.count("svg") == 1
    assert len(page.data("sample-data")) == 40


def test_headline_gives_the_last_value_and_the_change_since_the_first(run):
    rows = [{"step": 0, "evaluation/mean@4": 0.25}, {"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.3}]
    write_lines(run / "metrics.jsonl", [*rows, {"step": 3, "reward/mean": 0.75, "evaluation/mean@4": 0.75}])
    text = Page(render_report(run)).text
    assert "Held-out mean@4 75.0% +50.0 points since step 0 (25.0%)" in text
    assert "Reward 0.75 +0.25 since step 1 (0.5)" in text


def test_curves_carry_the_logged_numbers_by_step(run):
    chart = next(c for c in Page(render_report(run)).data("chart-data").values() if c["traces"][0]["name"] == "mean@4")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [trace["name"] for trace in chart["traces"]] == ["mean@4", "pass@4", "maj@4"]
    assert chart["traces"][0]["steps"] == [0, 10, 20, 30, 40]
    expected = [row["evaluation/mean@4"] for row in logged if "evaluation/mean@4" in row]
    assert chart["traces"][0]["values"] == pytest.approx(expected, rel=1e-5)


def test_every_metric_has_a_chart_and_no_metric_has_two(run):
    replace_metric(run, "tools/calls", lambda step: step)
    files = read_run(run)
    groups, num_left_out = charts_of(files)
    drawn = [name for _, charts in groups for chart in charts for name in chart.series]
    assert sorted([*drawn, "reward/std"]) == sorted(name for name in files.series if not name.startswith("time/"))
    assert groups[-1][0] == "More metrics: tools"
    assert num_left_out == 0


def test_a_flood_of_own_metrics_is_bounded_and_said(run):
    write_lines(run / "metrics.jsonl", [{"step": 1, **{f"own/{i:03}": i for i in range(MAX_OWN_CHARTS + 7)}}])
    page = Page(render_report(run))
    assert len(page.data("chart-data")) == MAX_OWN_CHARTS
    assert "7 more metrics are in metrics.jsonl" in page.text


def test_seconds_are_stacked_by_part_and_the_share_counts_evaluation_on_top(run):
    rows = [{"step": s, "time/step": 8.0, "time/rollout": 5.0, "time/policy": 2.0} for s in (1, 2)]
    write_lines(run / "metrics.jsonl", [*rows, {"step": 3, "time/evaluate": 4.0}])
    page = Page(render_report(run))
    stack = page.data("chart-data")["chart-time"]
    assert stack["steps"] == [1, 2, 3]
    assert {part["name"]: part["values"] for part in stack["parts"]} == {
        "rollout": [5, 5, 0], "policy": [2, 2, 0], "evaluate": [0, 0, 4],
    }  # fmt: skip
    assert stack["total"] == [8, 8, 0]
    assert "rollout 5 5 2 50.0%" in page.text
    assert "evaluate 4 4 1 20.0%" in page.text


def test_the_states_of_each_pool_of_ranks_are_stacked(run):
    rows = [{"step": s, "seconds/0-1/other": 1.0, "seconds/0-1/train": 3.0, "seconds/2/generate": 4.0} for s in (1, 2)]
    write_lines(run / "metrics.jsonl", rows)
    page = Page(render_report(run))
    charts = page.data("chart-data")
    assert [part["name"] for part in charts["chart-pool-0"]["parts"]] == ["train", "other"]
    assert charts["chart-pool-0"]["parts"][0]["values"] == [3, 3]
    assert charts["chart-pool-1"]["parts"] == [{"name": "generate", "values": [4, 4]}]
    assert "Seconds of ranks 0-1 train 75%, other 25%" in page.text
    assert charts.keys() == {"chart-pool-0", "chart-pool-1"}


def test_page_loads_nothing_and_runs_its_own_scripts_only(run):
    text = render_report(run)
    page = Page(text)
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "data", "action"} & attributes.keys(), tag
        assert attributes.get("href", "#").startswith("#"), tag
    own = [script for script in page.scripts if "plotly.js v" not in script[:300]]
    assert len(own) == len(page.scripts) - 1
    outside = re.sub(r"<script>/\*\*\s.\s*plotly.js.*?</script>", "", text, flags=re.DOTALL)
    assert len(outside) < len(text) - 1_000_000
    assert not re.search(r"https?://|@import|url\((?!#)", outside)
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    executed = [
        script
        for script, (_, attributes) in zip(page.scripts, [e for e in page.elements if e[0] == "script"], strict=True)
        if "type" not in attributes
    ]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in executed]
    assert re.findall(r"sha256-([^']+)'", policy) == hashes


def test_text_of_the_run_is_never_markup(run):
    clean = Page(render_report(run))
    spoil_with(run, EVIL)
    page = Page(render_report(run))
    assert page.count("script") == clean.count("script")
    assert page.count("img") == 0
    assert page.count("title") == clean.count("title")
    assert not [script for script in page.scripts if script[:1] in "[{" and set("<>&") & set(script)]
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    last = page.data("sample-data")[-1]["groups"][0]
    (detail,) = last["samples"][0]["details"]
    assert last["prompt"] == last["samples"][0]["response"] == detail["error"] == detail["said"] == EVIL
    assert f"Model {' '.join(EVIL.split())}" in page.text


def test_half_a_surrogate_pair_in_a_response_does_not_break_the_file(run):
    row = sample_rows(40, 1.0, random.Random(0))[0] | {"response": "\ud800", "answer": "\udfff"}
    write_lines(run / "samples/step-000040.jsonl", [row])
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert page.data("sample-data")[-1]["groups"][0]["samples"][0]["response"] == "\ud800"


def test_picture_keeps_what_draws_and_drops_what_acts():
    clean = clean_svg(
        '<?xml version="1.0"?><svg xmlns="x" viewBox="0 0 9 9" onload="a()"><style>.a{fill:var(--ink)}</style>'
        "<style>@import 'x'</style><style>.b{fill:url(http://x)}</style><script>alert(1)</script>"
        '<foreignObject><div>hidden</div></foreignObject><image href="http://x"/><a href="javascript:a()">no</a>'
        '<use href="http://x#a"/><use href="#b"/><rect fill="url(#g)" stroke="url(http://x)"/><text>a &lt; b</text>'
        "</svg>"
    )
    assert '<svg viewBox="0 0 9 9">' in clean
    assert "<style>.a{fill:var(--ink)}</style><style></style><style></style>" in clean
    assert '<use></use><use href="#b"></use><rect fill="url(#g)"></rect><text>a &lt; b</text></svg>' in clean
    assert not re.search("script|alert|hidden|http|onload|image|no<", clean)


@pytest.mark.parametrize(
    "text",
    ["<svg>", "<svg/><svg/>", "<p>text</p>", "<g/>", "no markup", '<!DOCTYPE s [<!ENTITY e "&e;">]><svg>&e;</svg>'],
)
def test_a_picture_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="holds no complete <svg>"):
        clean_svg(text)


def test_names_in_capitals_and_styles_in_parts_act_no_more_than_others():
    clean = clean_svg(
        '<svg ONLOAD="a()"><SCRIPT>a()</SCRIPT><style>@imp<g>ort</g> "x"</style><use HREF="http://x"/></svg>'
    )
    assert clean == "<svg><style></style><use></use></svg>"
