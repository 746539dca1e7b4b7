"""A browser draws the page, light and dark."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.unit.observability.report.runs import EVIL, Page, metrics_row, sample_rows, spoil_with, write_lines

from leaderless.observability.report.page import write_report

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
    samples = page.data("sample-data")[-1]["groups"]
    shown = sum(attributes.get("class") == "sample" for _, attributes in page.elements)
    assert shown == sum(len(group["samples"]) for group in samples) < 32
    assert re.search(r"× \d", page.text)
    assert "32 responses to 5 prompts" in page.text
    assert page.count("img") == 0


@needs_browser
def test_browser_shows_tokens_and_held_out_samples(run, tmp_path):
    row = sample_rows(40, 1.0, random.Random(0))[0] | {"prompt": "held out?"}
    view = {"total": 3, "text": ["<b>", "tool"], "rollout": [-0.25, None], "mask": [1, 0]}
    write_lines(run / "samples/evaluation-000040.rank-0.jsonl", [row | {"tokens": view}])
    write_lines(run / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in (39, 40)])  # few charts
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    click = "document.querySelector('input[value=held-out-data]').click();"
    click += "[...document.querySelectorAll('.sample .fold')].at(-1).click();"
    path.write_text(text.replace("</body>", f"<script>{click}</script></body>"), encoding="utf-8")
    document = browse(path, tmp_path / "profile", is_dark=False)
    page = Page(document)
    assert "data-error" not in dict(page.elements)["html"]
    assert "held out?" in page.text
    titles = [attributes["title"] for _, attributes in page.elements if "token" in attributes.get("class", "").split()]
    assert titles == ['"<b>"\nrollout_log_probs -0.250 (probability 0.779)', '"tool"\nnot sampled by the policy']
    assert "… 1 more token" in page.text


@needs_browser
def test_browser_draws_two_steps_in_dark_and_tells_the_reader_of_a_fault(run, tmp_path):
    write_lines(run / "metrics.jsonl", [metrics_row(step, 2, random.Random(0)) for step in (0, 1, 2)])
    path = write_report(run)
    path.write_text(path.read_text(encoding="utf-8").replace('id="groups"', 'id="gone"'), encoding="utf-8")
    document = browse(path, tmp_path / "profile", is_dark=True)
    page = Page(document)
    assert re.search(r'class="xtick"><text[^>]*fill: rgb\(157, 154, 145\)', document)
    charts = [chart for chart in document.split('class="plot')[1:] if 'class="xtick"' in chart]
    ticks = [re.findall(r'class="xtick"><text[^>]*>([^<]*)</text>', chart) for chart in charts]
    assert len(ticks) > 10
    assert all(names == sorted(set(names)) for names in ticks), "each step is named once"
    assert {len(names) for names in ticks} <= {2, 3}
    assert "replaceChildren" in dict(page.elements)["html"]["data-error"]
    assert "Part of this page could not be drawn" in page.text
