"""A browser shows runs that go on: charts get new points, samples are found, texts are readable, keys are enough."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live_page import CHROMEDRIVER, Browser, browser, served, write_status
from tests.unit.observability.report.runs import metrics_row, sample_rows, write_lines, write_run

pytestmark = pytest.mark.skipif(
    CHROMEDRIVER is None, reason="no chromedriver: apt-get install chromium chromium-driver"
)
ENTER, TAB, SPACE, BACKSPACE = "\ue007", "\ue004", " ", "\ue003"
LEFT, RIGHT = "\ue012", "\ue014"
CONTRAST = """
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (color) => {
      const [r, g, b] = color.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
      if (!node) return [255, 255, 255];
      const [r, g, b, a] = rgba(getComputedStyle(node).backgroundColor);
      if (a === 255) return [r, g, b];
      return behind(node.parentElement).map((c, i) => ([r, g, b][i] * a) / 255 + c * (1 - a / 255));
    };
    return arguments[0].map((selector) => {
      const node = document.querySelector(selector);
      const [one, other] = [luminance(rgba(getComputedStyle(node).color).slice(0, 3)), luminance(behind(node))];
      return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    });
"""
"""Contrast of the texts of some elements with what is behind them: 4.5 is readable."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def test_runs_are_listed_compared_watched_and_stopped(tmp_path: Path, page: Browser) -> None:
    run = write_run(tmp_path / "runs/alpha", 6)
    shutil.copytree(run, run.with_name("beta"))
    write_status(run, 0, doing="rollout", every_s=60.0)  # so that it is not gone on a slow machine
    points = "document.querySelector('#chart-1').data.at(-1).x.length"
    with served(run.parent) as address:
        page.open(address)
        page.wait("document.documentElement.dataset.shownRuns === '2'")
        page.run("document.getElementById('add-column').focus()")
        page.press(*"batch.prompts_per_step", ENTER)
        page.wait("document.querySelectorAll('button.drop').length === 1")
        page.wait("document.documentElement.dataset.shownRuns === '2'")
        assert page.run("return document.querySelector('#runs tbody tr').innerText.split('\\t')").count("32") == 1
        page.run("document.querySelector('button.drop').click()")
        page.wait("document.querySelectorAll('button.drop').length === 0")
        page.wait("document.documentElement.dataset.shownRuns === '2'")
        page.press("/", *"alp")
        page.wait("document.documentElement.dataset.shownRuns === '1'")
        assert page.run("return document.activeElement.id") == "find-runs"
        page.run("document.activeElement.select()")
        page.press("a")
        page.wait("document.documentElement.dataset.shownRuns === '2'")
        page.run("document.querySelector('tbody input').focus()")
        page.press(SPACE, TAB, TAB, SPACE)
        page.run("document.getElementById('compare').focus()")
        page.press(ENTER)
        page.wait("document.querySelectorAll('#curves .js-plotly-plot').length > 1")
        names = page.run("return [...new Set(document.querySelector('.js-plotly-plot').data.map((one) => one.name))]")
        assert sorted(names) == ["alpha", "beta"]
        assert page.errors() == ""

        page.open(f"{address}/runs/alpha")
        page.wait("document.querySelectorAll('#curves .js-plotly-plot').length > 1")
        page.wait("document.querySelector('#now .box.active text.name')?.textContent === 'rollout'")
        before = page.run(f"return {points}")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_row(7, 40, random.Random(0))) + "\n")
        write_status(run, 0, doing="policy", every_s=60.0)
        page.wait(f"{points} === arguments[0]", before + 1)
        page.wait("document.querySelector('#now .box.active text.name')?.textContent === 'policy'")
        page.wait("document.getElementById('now-body').textContent.includes('step 7')")

        color = "getComputedStyle(document.querySelector('#chart-1 .xtick text')).fill"
        page.dark(is_dark=False)
        page.wait(f"{color} === 'rgb(107, 105, 99)'")
        page.dark(is_dark=True)
        page.wait(f"{color} === 'rgb(157, 154, 145)'")

        page.run("window.confirm = () => true; document.getElementById('stop').focus()")
        page.press(ENTER)
        page.wait("document.getElementById('stop-said').textContent.includes('It stops after this step')")
        assert (run / "stop").exists()
        assert page.errors() == ""


def write_fruits(run: Path) -> None:
    """Samples of the last step: one for each state."""
    first, *_ = sample_rows(6, 1.0, random.Random(0))
    common = {"group_id": 1, "prompt": "Name a fruit.", "answer": "apple", "is_truncated": False}
    right, wrong, failed, cut = (
        first | common | {"sample_id": str(number), "response": response, "reward": reward} | more
        for number, (response, reward, more) in enumerate(
            [
                ("an Apple", 1.2, {"details": {"math": {"value": 1.0}}}),
                ("a brick\n" * 20, 0.2, {"details": {"math": {"value": 0.0}}}),
                ("a pear", 0.0, {"is_valid": False, "details": {"math": {"error": "the grader timed out"}}}),
                ("an app", 0.2, {"is_truncated": True, "details": {"math": {"value": 0.0}}}),
            ]
        )
    )
    write_lines(run / "samples/step-000006.jsonl", [right, wrong, failed, cut])
    write_lines(run / "samples/evaluation-000006.jsonl", [right | {"prompt": "Held out: name a tree."}])


def test_samples_are_searched_and_filtered_by_keys_in_light_and_dark(tmp_path: Path, page: Browser) -> None:
    run = write_run(tmp_path / "runs/alpha", 6)
    write_fruits(run)

    def shows(*responses: str) -> None:
        """Wait for these responses and no others."""
        shown = "[...document.querySelectorAll('#groups .sample .text')].map((one) => one.textContent.split('\\n')[0])"
        page.wait(f"JSON.stringify({shown}) === JSON.stringify(arguments[0])", list(responses))

    def focus(element: str) -> None:
        page.run(f"document.querySelector({element!r}).focus()")

    everything = ("an Apple", "a brick", "a pear", "an app")
    texts = [
        "#groups .text",
        "mark",
        ".group .summary b",
        ".tag.correct",
        ".tag.cut",
        "#found",
        "#find",
        ".filter span",
    ]
    with served(run.parent) as address:
        page.dark(is_dark=False)
        page.open(f"{address}/runs/alpha")
        shows(*everything)
        focus("#find")
        page.press(*"App")
        page.wait("document.querySelectorAll('#groups mark').length === 3")  # two responses and the expected answer
        assert page.run("return document.querySelector('#groups mark').textContent") == "app"
        for is_dark in (False, True):
            page.dark(is_dark=is_dark)
            background = "getComputedStyle(document.body).backgroundColor"
            page.wait(f"(Number({background}.match(/\\d+/)[0]) < 128) === arguments[0]", is_dark)
            contrasts = dict(zip(texts, page.run(CONTRAST, texts), strict=True))
            assert min(contrasts.values()) >= 4.5, contrasts
        page.press(*[BACKSPACE] * 3, *"timed")
        shows("a pear")
        assert page.run("return document.getElementById('found').textContent") == "1 of 4 responses to 1 prompt"

        page.press(*[BACKSPACE] * 5)
        shows(*everything)
        focus("input[name=state]:checked")
        for expected in (["an Apple"], ["a brick", "an app"], ["a pear"], ["an app"]):
            page.press(RIGHT)
            shows(*expected)
        page.press(LEFT, LEFT, TAB, *"0.1")  # wrong ones, with rewards from 0.1 on
        shows("a brick", "an app")
        page.press(TAB, *"0.1")
        shows()
        assert page.run("return document.getElementById('found').textContent") == "0 of 4 responses to 0 prompts"
        page.press(*[BACKSPACE] * 3)
        shows("a brick", "an app")
        focus("#groups .fold")
        page.press(ENTER)
        assert page.run("return document.activeElement.getAttribute('aria-expanded')") == "true"
        focus("input[name=kind]:checked")
        page.press(RIGHT)
        shows()  # the only held-out one is correct
        page.press(LEFT)
        focus("#step-range")
        page.press(LEFT)
        page.wait("document.getElementById('step-output').value === '5'")
        assert page.errors() == ""


def test_no_chart_is_alone_in_a_row_with_room_for_more(tmp_path: Path, page: Browser) -> None:
    run = write_run(tmp_path / "runs/alpha", 3)
    # The number of charts in each row, and the right edges of rows and of what holds them.
    script = """
        const [width, number] = arguments;
        document.querySelector("main").style.maxWidth = `${width}px`;
        const group = document.querySelector(".charts");
        const card = group.querySelector(".chart");
        group.replaceChildren(...Array.from({ length: number }, () => card.cloneNode()));
        const boxes = [...group.children].map((chart) => chart.getBoundingClientRect());
        const tops = [...new Set(boxes.map((box) => box.top))];
        const edge = group.getBoundingClientRect().right;
        return tops.map((top) => {
          const row = boxes.filter((box) => box.top === top);
          return [row.length, Math.abs(edge - Math.max(...row.map((box) => box.right))) < 2];
        });
    """
    rows = {1: [1], 2: [2], 3: [3], 4: [2, 2], 5: [3, 2], 6: [3, 3], 7: [3, 2, 2], 8: [3, 3, 2]}
    with served(run.parent) as address:
        page.open(f"{address}/runs/alpha")
        page.wait("document.querySelector('.charts .chart')")
        for number, expected in rows.items():
            assert page.run(script, 1600, number) == [[count, True] for count in expected]
        page.do("window/rect", width=900, height=900)
        assert page.run(script, 1600, 5) == [[2, True], [2, True], [1, True]]
        page.do("window/rect", width=1400, height=1600)
