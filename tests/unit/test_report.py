"""The report about a run: one page, whatever the run directory holds."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from leaderless.config import dump_recipe, load_recipe
from leaderless.observability.report import render_report, write_report
from leaderless.observability.report.catalogue import MAX_OWN_CHARTS, charts_of
from leaderless.observability.report.checks import review
from leaderless.observability.report.curves import MAX_POINTS, Series, mean_per_run, thin
from leaderless.observability.report.picture import clean_svg
from leaderless.observability.report.run_files import flatten_recipe, read_run
from leaderless.observability.report.sample_files import BUDGET_BYTES, read_samples
from leaderless.observability.report.samples import MAX_TEXT_CHARACTERS, Judge
from leaderless.planner import Cluster, make_plan
from leaderless.planner.picture import draw_plan
from leaderless.workflow import resolve_workflow

RECIPE = """
name: qwen3-gsm8k
workflow: grpo
models: {policy: MODEL}
data:
  train: {path: openai/gsm8k, prompt: question, answer: answer}
  evaluation: {path: openai/gsm8k, split: test, prompt: question, answer: answer}
reward: {math: 1.0, format: {weight: 0.2, pattern: ".*<answer>.*"}}
batch: {prompts_per_step: 32, responses_per_prompt: 8}
evaluation: {every_steps: 10, responses_per_prompt: 4, temperature: 1.0}
algorithm: {kl: {coefficient: 0.001}}
layout: {rollout: {ranks: 0-3}, policy: {ranks: 4-7}}
steps: STEPS
"""

MODEL_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def write_run(directory: Path, num_steps: int = 40, *, seed: int = 0) -> Path:
    """A run directory as a healthy GRPO run leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    model = directory.parent / "Qwen3-1.7B"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    source = directory.parent / "recipe.yaml"
    source.write_text(RECIPE.replace("MODEL", str(model)).replace("STEPS", str(num_steps)))
    recipe = load_recipe(source).recipe
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(8))
    (directory / "config.yaml").write_text(dump_recipe(recipe))
    (directory / "plan.json").write_text(json.dumps(plan.to_json()))
    (directory / "plan.svg").write_text(draw_plan(plan))
    rng = random.Random(seed)
    write_lines(directory / "metrics.jsonl", [metrics_row(step, num_steps, rng) for step in range(num_steps + 1)])
    for step in range(1, num_steps + 1):
        write_lines(directory / f"samples/step-{step:06d}.jsonl", sample_rows(step, step / num_steps, rng))
    return directory


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replace_metric(run: Path, metric: str, value_at) -> Path:
    """Change one metric of every logged training step, by a function of the step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [row | {metric: value_at(row["step"])} if row["step"] else row for row in rows])
    return run


def metrics_row(step: int, num_steps: int, rng: random.Random) -> dict[str, object]:
    progress = 1 - math.exp(-3 * step / num_steps)

    def noisy(value: float, spread: float = 0.05) -> float:
        return value * rng.gauss(1, spread)

    row: dict[str, object] = {"step": step, "time_s": 21.5 * step + 4}
    if step % 10 == 0 or step == num_steps:
        row |= {"eval/mean@4": 0.41 + 0.3 * progress, "eval/pass@4": 0.62 + 0.2 * progress}
        row |= {"eval/maj@4": 0.47 + 0.28 * progress, "time/evaluate": noisy(6.5)}
    if step == 0:
        return row
    math_reward, format_reward = noisy(0.3 + 0.45 * progress), min(1.0, noisy(0.5 + 0.48 * progress, 0.02))
    row |= {
        "reward/mean": math_reward + 0.2 * format_reward,
        "reward/std": 0.45 - 0.1 * progress,
        "reward/math": math_reward,
        "reward/format": format_reward,
        "reward/failed": 0,
        "rollout/response_tokens": noisy(190 + 90 * progress),
        "rollout/truncated": noisy(0.08 - 0.05 * progress),
        "rollout/tokens_per_s": noisy(5200),
        "group/no_signal": noisy(0.12 + 0.15 * progress),
        "policy/loss": rng.gauss(0, 1e-3),
        "policy/grad_norm": noisy(0.35, 0.2),
        "policy/entropy": noisy(0.8 - 0.4 * progress),
        "policy/kl": noisy(0.02 * progress + 1e-4),
        "policy/clip_fraction": noisy(0.01),
        "policy/learning_rate": 1e-6 * min(1, step / 5),
        "mismatch/abs_mean": noisy(2e-4, 0.2),
        "mismatch/abs_max": noisy(8e-3, 0.3),
        "mismatch/kl": noisy(3e-7, 0.3),
        "throughput/tokens_per_s": noisy(3300),
        "data/epoch": step * 32 / 7473,
        "time/step": noisy(21.5),
        "time/rollout": noisy(11),
        "time/reward": noisy(0.6),
        "time/reference": noisy(1.9),
        "time/advantage": 0.01,
        "time/samples": 0.02,
        "time/policy": noisy(6.2),
        "time/weights(policy->0-3)": noisy(0.7),
        "time/load": 0.01,
        "time/reshard(rollout->4-7)": noisy(0.1),
        "time/reshard(advantage->4-7)": 0.01,
    }
    return row


def sample_rows(step: int, skill: float, rng: random.Random) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for prompt in range(4):
        a, b = rng.randint(12, 99), rng.randint(12, 99)
        question = f"A baker sells {a} loaves on Monday and {b} on Tuesday.\nHow many loaves does she sell in all?"
        is_right = [rng.random() < 0.2 + 0.6 * skill for _ in range(8)]
        mean = sum(is_right) / 8
        for sibling, right in enumerate(is_right):
            total = a + b if right else a + b + rng.choice([-10, 1, 10])
            response = f"She sells {a} loaves first.\nThen {b} more: {a} + {b} = {total}.\n\n<answer>{total}</answer>"
            details = {"math": {"value": float(right)}, "format": {"value": 1.0}}
            rows.append(
                {
                    "step": step,
                    "group_id": 1000 * step + prompt,
                    "sample_id": f"{step}-{prompt}-{sibling}",
                    "prompt": question,
                    "response": response,
                    "answer": str(a + b),
                    "reward": float(right) + 0.2,
                    "is_valid": True,
                    "details": details,
                    "advantage": right - mean,
                    "is_truncated": False,
                }
            )
    return rows


class Page(HTMLParser):
    """What a browser's parser finds in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def data(self, identifier: str):
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        return json.loads(self.scripts[[one.get("id") for one in scripts].index(identifier)])


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "template")


@pytest.fixture
def run(template, tmp_path) -> Path:
    """A healthy run that a test may spoil."""
    return Path(shutil.copytree(template, tmp_path / "run"))


def titles(run: Path) -> list[str]:
    return [finding.title for finding in review(read_run(run)).findings]


def test_page_of_a_healthy_run_has_all_its_parts(run):
    page = Page(render_report(run))
    assert page.count("h1") == 1
    assert {attributes.get("id") for tag, attributes in page.elements if tag == "section"} == {
        "checks", "curves", "time", "samples", "plan", "recipe",
    }  # fmt: skip
    for text in ("qwen3-gsm8k", "Workflow grpo", "World size 8", "Last step 40 of 40 planned", "Duration 14 min"):
        assert text in page.text
    assert "Nothing to worry about" in page.text
    assert "7 checks passed, 0 could not be made" in page.text
    assert "What is missing" not in page.text
    assert "reference log_probs reference rollout ranks 0-3 dp=4" in page.text
    assert "rollout → policy policy_versions, prompt_tokens" in page.text
    assert "peak on the fullest rank, estimated" in page.text
    assert "responses_per_prompt: 8" in page.text
    assert page.count("svg") == 1
    assert len(page.data("sample-data")) == 40


def test_headline_gives_the_last_value_and_the_change_since_the_first(run):
    rows = [{"step": 0, "eval/mean@4": 0.25}, {"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.3}]
    write_lines(run / "metrics.jsonl", [*rows, {"step": 3, "reward/mean": 0.75, "eval/mean@4": 0.75}])
    text = Page(render_report(run)).text
    assert "Held-out mean@4 75.0% +50.0 points since step 0 (25.0%)" in text
    assert "Reward 0.75 +0.25 since step 1 (0.5)" in text


def test_curves_carry_the_logged_numbers_by_step(run):
    chart = next(c for c in Page(render_report(run)).data("chart-data").values() if c["traces"][0]["name"] == "mean@4")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [trace["name"] for trace in chart["traces"]] == ["mean@4", "pass@4", "maj@4"]
    assert chart["traces"][0]["steps"] == [0, 10, 20, 30, 40]
    expected = [row["eval/mean@4"] for row in logged if "eval/mean@4" in row]
    assert chart["traces"][0]["values"] == pytest.approx(expected, rel=1e-5)


def test_every_metric_has_a_chart_and_no_metric_has_two(run):
    replace_metric(run, "tools/calls", lambda step: step)
    files = read_run(run)
    groups, num_left_out = charts_of(files)
    drawn = [name for group in groups for chart in group.charts for name in chart.series]
    assert sorted([*drawn, "reward/std"]) == sorted(name for name in files.series if not name.startswith("time/"))
    assert groups[-1].title == "More metrics: tools"
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


EVIL = "</script><script>alert(1)</script></script ><img src=x onerror=alert(2)>&lt;b\u2028\" '"


def spoil_with(run: Path, evil: str) -> None:
    """Put a text wherever a run directory can hold one."""
    rows = sample_rows(40, 1.0, random.Random(0))
    texts = {"prompt": evil, "response": evil, "answer": evil, "group_id": evil, "is_valid": False}
    rows[0] |= {**texts, "details": {evil: {"error": evil}}}
    write_lines(run / "samples/step-000040.jsonl", rows)
    replace_metric(run, "reward/failed", lambda _: 1)
    replace_metric(run, evil, lambda step: step)
    replace_metric(run, f"time/{evil}", lambda step: step)
    plan = json.loads((run / "plan.json").read_text())
    plan |= {"recipe": evil, "workflow": evil, "pruned": [evil], "batch": {evil: evil}}
    plan["nodes"][0] |= {"name": evil, "run": evil, "layout": evil}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "config.yaml").write_text(f"models:\n  policy:\n    path: {evil}\n")


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
    assert last["prompt"] == last["samples"][0]["response"] == last["samples"][0]["details"][0]["error"] == EVIL
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
    assert '<svg viewbox="0 0 9 9">' in clean
    assert "<style>.a{fill:var(--ink)}</style><style></style><style></style>" in clean
    assert '<use></use><use href="#b"></use><rect fill="url(#g)"></rect><text>a &lt; b</text></svg>' in clean
    assert not re.search("script|alert|hidden|http|onload|image|no<", clean)


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "plan.svg", "metrics.jsonl", "samples"])
@pytest.mark.parametrize("how", ["missing", "empty", "broken"])
def test_page_comes_out_and_says_what_is_missing(run, name, how):
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if how != "missing" and name != "samples":
        path.write_text("" if how == "empty" else '[{"unclosed": <svg')
    page = Page(render_report(run))
    is_still_a_recipe = name == "config.yaml" and how == "broken"
    assert ("What is missing" in page.text) != is_still_a_recipe
    assert is_still_a_recipe or name in page.text
    assert page.count("h2") >= 6


def test_page_of_an_empty_directory_comes_out(tmp_path):
    page = Page(render_report(tmp_path))
    assert tmp_path.name in page.text
    for name in ("config.yaml", "plan.json", "plan.svg", "metrics.jsonl", "samples/"):
        assert name in page.text
    assert "Nothing could be checked yet" in page.text


@pytest.mark.parametrize("plan", ["[1]", "null", '{"nodes": 3, "edges": {"a": 1}, "batch": [], "memory_bytes": "x"}'])
def test_a_plan_of_another_shape_does_not_break_the_page(run, plan):
    (run / "plan.json").write_text(plan)
    assert Page(render_report(run)).count("h1") == 1


def test_samples_are_not_missed_where_no_node_records_them(run):
    plan = json.loads((run / "plan.json").read_text())
    plan["nodes"] = [node for node in plan["nodes"] if node["run"] != "record"]
    (run / "plan.json").write_text(json.dumps(plan))
    shutil.rmtree(run / "samples")
    assert read_run(run).notes == ()
    assert "No sample was recorded." in Page(render_report(run)).text


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="no-such-run"):
        write_report(tmp_path / "no-such-run")


def test_unfinished_last_line_is_skipped_and_a_broken_one_before_is_said(run):
    whole = read_run(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "reward/me')
    assert (read_run(run).steps, read_run(run).notes) == (whole.steps, ())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 42, "reward/mean": 1}\n')
    assert read_run(run).steps == (*whole.steps, 42)
    assert read_run(run).notes == ("metrics.jsonl: 1 lines are no JSON objects and were passed over.",)


def test_last_row_of_a_repeated_step_wins(run):
    rows = [{"step": step, "time_s": 10.0 * step, "reward/mean": float(step)} for step in (1, 2, 3)]
    write_lines(run / "metrics.jsonl", [*rows, {"step": 2, "time_s": 4.0, "reward/mean": 7.0}])
    files = read_run(run)
    assert files.series["reward/mean"] == Series((1, 2, 3), (1.0, 7.0, 3.0))
    assert files.duration_s == 10 + 4 + 26


def test_last_recording_of_a_sample_wins(run):
    rows = sample_rows(40, 1.0, random.Random(0))
    write_lines(run / "samples/step-000040.jsonl", [*rows, rows[0] | {"response": "again"}])
    step = read_samples(run / "samples", Judge()).steps[-1]
    assert [len(group.samples) for group in step.groups] == [8, 8, 8, 8]
    assert step.groups[0].samples[0].response == "again"


def test_samples_of_all_ranks_of_a_step_are_shown_together(run):
    rows = [row | {"sample_id": f"r{row['sample_id']}", "group_id": 7} for row in sample_rows(40, 1, random.Random(1))]
    write_lines(run / "samples/step-000040.rank-3.jsonl", rows[:8])
    step = read_samples(run / "samples", Judge()).steps[-1]
    assert step.num_recorded == 40
    assert [group.group_id for group in step.groups] == ["40000", "40001", "40002", "40003", "7"]


def test_chat_messages_read_as_text(run):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    row = sample_rows(40, 1.0, random.Random(0))[0] | {"prompt": messages}
    write_lines(run / "samples/step-000040.jsonl", [row])
    assert read_run(run).samples.steps[-1].groups[0].prompt == "[system]\nBe brief.\n\n[user]\n1+1?"


WARNINGS = {
    "Values that are no finite numbers": ("policy/loss", lambda bad: float("nan") if bad else 0.0),
    "Rewards that could not be computed": ("reward/failed", lambda bad: 1 if bad else 0),
    "Engine and trainer disagree about log-probs": ("mismatch/abs_mean", lambda bad: 0.051 if bad else 0.05),
    "Most groups teach nothing": ("group/no_signal", lambda bad: 0.51 if bad else 0.5),
    "Many responses are cut off": ("rollout/truncated", lambda bad: 0.21 if bad else 0.2),
    "The policy's entropy has collapsed": ("policy/entropy", lambda bad: 0.09 if bad else 0.1),
    "The gradient norm spikes": ("policy/grad_norm", lambda bad: 10.1 if bad else 10.0),
}


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
    assert "6 checks passed, 0 could not be made" in page.text


def test_failed_rewards_come_with_count_and_example(run):
    rows = sample_rows(7, 1.0, random.Random(0))
    rows[3] |= {"is_valid": False, "reward": 0.0, "details": {"math": {"error": "TimeoutError: <10 s>"}}}
    write_lines(run / "samples/step-000007.jsonl", rows)
    replace_metric(run, "reward/failed", lambda step: 3 if step in {7, 9} else 0)
    finding = review(read_run(run)).findings[0]
    assert finding.seen == "6 responses in 2 of 40 logged steps, the last at step 9."
    assert finding.example == "step 7, math: TimeoutError: <10 s>"
    assert "step 7, math: TimeoutError: <10 s>" in Page(render_report(run)).text
    assert read_run(run).samples.steps[6].groups[0].samples[3].reward is None


@pytest.mark.parametrize("written", ["NaN", "-Infinity", "null", "1e999", "1" + "0" * 400])
def test_a_value_that_is_not_finite_is_a_gap_and_a_warning(run, written):
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "policy/loss": 0.5}}\n{{"step": 2, "policy/loss": {written}}}\n')
    assert titles(run) == ["Values that are no finite numbers"]
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
    assert (len(outcome.findings), len(outcome.passed), len(outcome.not_made)) == (0, 1, 6)
    text = Page(render_report(run)).text
    assert "1 checks passed, 6 could not be made" in text
    assert "Loss 0 −1 since step 1 (1)" in text


def test_thinned_curve_keeps_ends_and_spikes():
    values = [math.sin(i / 50) for i in range(10_000)]
    values[1234], values[7777] = 99.0, -99.0
    series = thin(Series(tuple(range(10_000)), tuple(values)))
    assert 1000 < len(series.steps) <= MAX_POINTS
    assert (series.steps[0], series.steps[-1]) == (0, 9_999)
    assert {(1234, 99.0), (7777, -99.0)} <= set(series.finite)
    assert list(series.steps) == sorted(set(series.steps))
    assert all(values[step] == value for step, value in series.finite)


def test_thinning_leaves_short_curves_alone_and_shows_long_gaps():
    short = Series(tuple(range(MAX_POINTS)), (0.5,) * MAX_POINTS)
    assert thin(short) is short
    gap = Series(tuple(range(100)), tuple(None if 40 <= i < 60 else 1.0 for i in range(100)))
    assert None in thin(gap, 20).values


def test_page_of_a_long_run_stays_small_and_says_so(run):
    num_steps = 6000
    rng = random.Random(0)
    write_lines(run / "metrics.jsonl", [metrics_row(step, num_steps, rng) for step in range(num_steps)])
    page = Page(render_report(run))
    for chart in page.data("chart-data").values():
        lengths = [len(trace["steps"]) for trace in chart.get("traces", [chart])]
        assert max(lengths) <= MAX_POINTS
    assert "Curves of more than 2,000 points are thinned" in page.text
    assert "Each point is a mean over neighbouring steps" in page.text


def test_stacked_means_by_hand():
    series = {"a": Series((1, 2, 3, 4), (1.0, 3.0, 5.0, None)), "b": Series((4,), (8.0,))}
    assert mean_per_run(series, 2) == ([1, 3], {"a": [2.0, 2.5], "b": [0.0, 4.0]})
    assert mean_per_run({}, 2) == ([], {})


def size_on_page(samples) -> int:
    return sum(step.size_bytes for step in samples.steps)


@pytest.mark.parametrize("budget", [30_000, 60_000, 150_000])
def test_samples_fill_the_budget_with_evenly_spread_steps(run, budget):
    samples = read_samples(run / "samples", Judge(), budget)
    steps = [step.step for step in samples.steps]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert budget / 2 < size_on_page(samples) <= budget
    assert (steps[0], steps[-1], samples.num_recorded_steps) == (1, 40, 40)
    assert max(gaps) - min(gaps) <= 1
    assert all(len(group.samples) == 8 for step in samples.steps for group in step.groups)


def test_page_says_how_many_steps_it_shows(run, monkeypatch):
    monkeypatch.setattr(read_samples, "__defaults__", (60_000,))
    page = Page(render_report(run))
    assert f"40 steps were recorded; {len(page.data('sample-data'))} of them" in page.text
    assert "to stay within 0.06 MB" in page.text


def test_steps_that_are_too_large_are_cut_between_samples(run):
    for step in (1, 40):
        rows = sample_rows(step, 1.0, random.Random(0))
        rows = [row | {"response": "x" * 15_000 + "&" * 4_000} for row in rows]
        write_lines(run / f"samples/step-{step:06d}.jsonl", rows)
    samples = read_samples(run / "samples", Judge(), 400_000)
    assert [step.step for step in samples.steps] == [1, 40]
    assert 250_000 < size_on_page(samples) <= 400_000
    assert [step.num_recorded for step in samples.steps] == [32, 32]
    assert 0 < samples.num_samples < 64


def test_a_very_long_text_is_cut_and_says_so(run):
    row = sample_rows(40, 1.0, random.Random(0))[0] | {"response": "y" * (MAX_TEXT_CHARACTERS + 1500)}
    write_lines(run / "samples/step-000040.jsonl", [row])
    response = read_run(run).samples.steps[-1].groups[0].samples[0].response
    assert response == "y" * MAX_TEXT_CHARACTERS + "\n[… 1,500 more characters are in the file]"
    assert size_on_page(read_run(run).samples) < BUDGET_BYTES


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"reward": 1.2, "details": {"math": {"value": 1.0}}}, "correct"),
        ({"reward": 0.2, "details": {"math": {"value": 0.0}, "format": {"value": 1.0}}}, "wrong"),
        ({"reward": 0.2, "details": {"format": {"value": 1.0}}}, "correct"),
        ({"reward": 0.0}, "wrong"),
        ({"reward": 1.0, "is_valid": False}, "failed"),
        ({"reward": None}, "failed"),
        ({"reward": float("nan")}, "failed"),
    ],
)
def test_correct_is_what_evaluation_calls_correct(row, state):
    assert Judge("math", 1.0).state(row) == state


def test_recipe_decides_what_correct_means(run):
    assert str(read_run(run).judge) == "math at least 1"
    text = (run / "config.yaml").read_text().replace("correct_at: 1.0", "correct_at: 0.5\n  metric: my.rewards:style")
    (run / "config.yaml").write_text(text)
    assert read_run(run).judge == Judge("my.rewards:style", 0.5)


def test_settings_are_those_of_the_resolved_recipe(template):
    settings = flatten_recipe((template / "config.yaml").read_text())
    recipe = load_recipe(template / "config.yaml").recipe
    assert settings["name",] == recipe.name
    assert settings["batch", "responses_per_prompt"] == str(recipe.batch.responses_per_prompt)
    assert settings["reward", "format", "pattern"] == ".*<answer>.*"
    assert float(settings["algorithm", "kl", "coefficient"]) == recipe.algorithm.kl.coefficient
    assert flatten_recipe("a:\n  b: 'it''s: 1'\n  m:f:\n    c: 2\nd: \"x\\ty\"") == {
        ("a", "b"): "it's: 1", ("a", "m:f", "c"): "2", ("d",): "x\ty",
    }  # fmt: skip


def test_report_is_replaced_whole_or_not_at_all(run, monkeypatch):
    path = write_report(run)
    assert path == run / "report.html"
    (run / "report.html").write_text("old")

    def fail(self, target):
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        write_report(run)
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_report(run)
    assert path.read_text(encoding="utf-8") == render_report(run)
    assert not [file.name for file in run.iterdir() if file.name.startswith(".")]


def test_report_needs_nothing_but_the_standard_library_and_plotly():
    code = "import leaderless.observability.report, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "plotly" in loaded
    assert not {"torch", "numpy", "pydantic", "yaml"} & set(loaded)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page with")


def browse(path: Path, profile: Path, *, is_dark: bool) -> str:
    """The document as a browser has it after all scripts have run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    flags += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", "--window-size=1400,8000"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@needs_browser
def test_browser_draws_charts_and_samples_without_an_error(run, tmp_path):
    spoil_with(run, EVIL)
    path = write_report(run)
    num_charts = len(Page(path.read_text(encoding="utf-8")).data("chart-data"))
    document = browse(path, tmp_path / "profile", is_dark=False)
    page = Page(document)
    root = dict(page.elements)["html"]
    assert not {"data-error", "data-blocked"} & root.keys()
    assert root["data-drawn-charts"] == str(num_charts)
    assert document.count('class="main-svg"') >= num_charts
    assert re.search(r'class="xtick"><text[^>]*fill: rgb\(107, 105, 99\)', document)
    assert sum(attributes.get("class") == "sample" for _, attributes in page.elements) == 32
    assert "32 responses to 5 prompts" in page.text
    assert page.count("img") == 0


@needs_browser
def test_browser_draws_in_dark_and_tells_the_reader_of_a_fault(run, tmp_path):
    write_lines(run / "metrics.jsonl", [metrics_row(1, 1, random.Random(0))])
    path = write_report(run)
    path.write_text(path.read_text(encoding="utf-8").replace('id="groups"', 'id="gone"'), encoding="utf-8")
    document = browse(path, tmp_path / "profile", is_dark=True)
    page = Page(document)
    assert re.search(r'class="xtick"><text[^>]*fill: rgb\(157, 154, 145\)', document)
    assert "replaceChildren" in dict(page.elements)["html"]["data-error"]
    assert "Part of this page could not be drawn" in page.text
