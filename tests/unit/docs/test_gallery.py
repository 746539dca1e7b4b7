"""The gallery and the page about controllers show what was measured, and nothing else."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from pathlib import Path
from statistics import median

import pytest
from benchmarks.film_strip import LABEL, MARGIN, SCALE, chosen, evaluations, picture
from PIL import Image

DOCS = Path(__file__).parents[3] / "docs"
sys.path.append(str(DOCS))

from generate_gallery import Chart, _smoothed, _stride, draw_chart, with_evidence, with_gallery  # noqa: E402
from generate_gdpo import _first_at, gdpo_pictures, with_gdpo  # noqa: E402
from generate_markup import NO_RESULTS, between  # noqa: E402


def test_results_stand_between_their_marks() -> None:
    page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert between(page, "x", "new") == "a\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nb\n"
    assert NO_RESULTS in between(page, "x", None)
    with pytest.raises(ValueError, match="a page must have '<!-- y: begin -->'"):
        between(page, "y", "new")


def test_a_chart_has_the_means_of_its_curves_and_a_band_from_the_lowest_to_the_highest() -> None:
    chart = draw_chart(Chart("step", {"a": [[(0, 0.0), (10, 1.0)], [(0, 0.5), (10, 1.0)]]}))
    band, mean = re.findall(r'<path d="(M[^"]+)" fill', chart)
    (left, top), (right, bottom) = (52, 16), (530, 280)
    height = bottom - top
    assert mean == f"M{left:.1f} {bottom - 0.25 * height:.1f}L{right:.1f} {top:.1f}"
    points = [tuple(map(float, point.split())) for point in band.strip("MZ").split("L")]
    assert points == [(left, bottom - 0.5 * height), (right, top), (right, top), (left, bottom)]


def test_curves_that_end_at_different_steps_are_lines_of_their_own() -> None:
    chart = draw_chart(Chart("step", {"a": [[(0, 0.0), (10, 1.0)], [(0, 0.5), (5, 1.0)]]}))
    assert re.findall(r'<path d="(M[^"]+)" fill="([^"]+)"', chart) == [
        ("M52.0 280.0L530.0 16.0", "none"),
        ("M52.0 148.0L291.0 16.0", "none"),
    ]


def test_curves_are_averaged_over_ten_steps() -> None:
    assert _smoothed([0.0] * 10 + [1.0] * 10 + [9.0]) == [(5, 0.0), (15, 1.0)]


@pytest.mark.parametrize(("last", "stride"), [(4, 1), (20, 5), (60, 10), (115, 20), (200, 50)])
def test_labels_are_at_round_numbers(last: float, stride: int) -> None:
    assert _stride(last) == stride


def test_figures_about_controllers_are_medians_of_what_was_measured() -> None:
    page = with_evidence((DOCS / "why-no-controller.md").read_text(encoding="utf-8"))
    transitions = json.loads((DOCS / "scaling/hosts.json").read_text(encoding="utf-8"))["transitions"]
    case = {"kind": "pools", "hosts": 8, "prompts": 1024, "max_tokens": 1024}
    seconds = {
        way: median(one["seconds"] for one in transitions if one["way"] == way and case.items() <= one["case"].items())
        for way in ("ours", "packed")
    }
    assert f"leaderless takes {seconds['ours']:.2f} s." in page
    assert f"{seconds['packed'] / seconds['ours']:.1f} times as long" in page


def test_figures_of_simulations_are_those_of_their_page() -> None:
    """A row of the page about controllers is one of the page about scaling, without its shares."""
    scaling = (DOCS / "scaling/simulation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \| (.+) \|$", (DOCS / "why-no-controller.md").read_text(encoding="utf-8"), re.M)
    simulated = [(ranks, cells.split(" | ")) for ranks, cells in rows if " s" in cells]
    assert len(simulated) == 3
    for ranks, (step, rows_s, theirs, their_rows) in simulated:
        assert re.search(rf"^\| {ranks} \| {step} \| {rows_s} \| \d+ % \| {theirs} \| {their_rows} \|", scaling, re.M)


def test_outcomes_of_recipes_are_means_over_their_seeds() -> None:
    page = with_gallery((DOCS / "gallery.md").read_text(encoding="utf-8"))
    runs = json.loads((DOCS / "performance/lora.json").read_text(encoding="utf-8"))
    ends = [run["curve"][-1] for run in runs if run["way"] == "rank 8"]
    row = next(line for line in page.splitlines() if "rank 8" in line and line.startswith("|"))
    assert f"| {sum(ends) / len(ends):.1%} ({min(ends):.1%} to {max(ends):.1%}) | {len(ends)} |" in row


def strip(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (10, 5), color).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a_film_strip_shows_first_what_has_failed_before(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for step, rewards in ((0, {1: 1.0, 2: 0.0, 3: 0.0}), (40, {1: 1.0, 2: 1.0})):
        rows = [{"group_id": group, "reward": reward, "images": [strip("red")]} for group, reward in rewards.items()]
        path = tmp_path / f"samples/evaluation-{step:06d}.rank-0.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = evaluations(tmp_path)
    assert sorted(played) == [0, 40]
    assert chosen(played[0], played[40]) == [2, 1], "3 is not in both"
    page = picture([("before", played[0][0]), ("after", played[40][0])])
    assert page.size == (10 * SCALE + 2 * MARGIN, 2 * (5 * SCALE + LABEL + MARGIN) + MARGIN)
    assert page.convert("RGB").getpixel((MARGIN + 1, MARGIN + LABEL + 1)) == (255, 0, 0)


def test_a_reward_is_learned_when_several_steps_in_a_row_reach_the_target() -> None:
    assert _first_at([0.2, 0.95, 0.8, 0.9, 0.9, 1.0, 0.9, 0.91]) == "4"
    assert _first_at([0.9] * 4) == "never"
    page = with_gdpo((DOCS / "algorithms/gdpo.md").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (GRPO|GDPO)[^|]*\| ([^|]+) \| ([^|]+) \|", page, re.M)
    assert [name for name, *_ in rows] == ["GRPO", "GRPO", "GDPO"]
    assert all(len(steps.split(", ")) == 3 for _, *both in rows for steps in both)
    assert all(label in gdpo_pictures()["gdpo"] for label in ("GRPO", "GRPO, both in one scale", "GDPO"))
