"""A browser shows runs that go on: charts get new points, colors follow the reader's, and keys are enough."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from tests.live_page import CHROMEDRIVER, browser, served, write_status
from tests.unit.report.runs import metrics_row, write_run

pytestmark = pytest.mark.skipif(
    CHROMEDRIVER is None, reason="no chromedriver: apt-get install chromium chromium-driver"
)
ENTER, TAB, SPACE = "\ue007", "\ue004", " "


def test_runs_are_listed_compared_watched_and_stopped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/alpha", 6)
    shutil.copytree(run, run.with_name("beta"))
    write_status(run, 0, doing="rollout")
    points = "document.querySelector('#chart-1').data.at(-1).x.length"
    with served(run.parent) as address, browser(tmp_path / "profile") as page:
        page.open(address)
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
        page.wait("document.querySelectorAll('#curves .js-plotly-plot').length > 2")
        names = page.run("return [...new Set(document.querySelector('.js-plotly-plot').data.map((one) => one.name))]")
        assert sorted(names) == ["alpha", "beta"]
        assert page.errors() == ""

        page.open(f"{address}/runs/alpha")
        page.wait("document.querySelectorAll('#curves .js-plotly-plot').length > 2")
        page.wait("document.querySelector('#now .box.active text.name').textContent === 'rollout'")
        before = page.run(f"return {points}")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_row(7, 40, random.Random(0))) + "\n")
        write_status(run, 0, doing="policy")
        page.wait(f"{points} === arguments[0]", before + 1)
        page.wait("document.querySelector('#now .box.active text.name').textContent === 'policy'")
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
