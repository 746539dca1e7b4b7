"""The page as a whole."""

from __future__ import annotations

import base64
import hashlib
import os
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from leaderless.observability.report.chart_sections import curves_section, time_section
from leaderless.observability.report.checks import review
from leaderless.observability.report.failure_section import failure_section
from leaderless.observability.report.guard_section import guard_section
from leaderless.observability.report.markup import Html, element, join, json_block
from leaderless.observability.report.overview import checks_section, facts, headline, notes_section
from leaderless.observability.report.plan_section import plan_section
from leaderless.observability.report.run_files import RunFiles, read_run
from leaderless.observability.report.sample_files import Samples

FILE_NAME = "report.html"
"""Name of the page in a run directory."""


def write_report(run_directory: Path) -> Path:
    """Write `report.html` into a run directory; a reader sees the old page or the new one, never half of one.

    Args:
        run_directory: As a run writes it, or as much of it as there is.

    Returns:
        Path of the page.

    Raises:
        ValueError: There is no such directory.
    """
    page = render_report(run_directory)
    target = run_directory / FILE_NAME
    unfinished = run_directory / f".{FILE_NAME}.{os.getpid()}"
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def render_report(run_directory: Path) -> str:
    """The report about a run as one self-contained HTML page.

    Args:
        run_directory: As a run writes it, or as much of it as there is; the page says what is missing.

    Raises:
        ValueError: There is no such directory.
    """
    if not run_directory.is_dir():
        raise ValueError(f"run directory '{run_directory}': there is no such directory; name one under `run.directory`")
    run = read_run(run_directory)
    curves, times = curves_section(run), time_section(run)
    scripts = [_asset("boot.js"), _plotly(), _asset("charts.js"), _asset("samples.js")]
    page = Template(_asset("page.html")).substitute(
        policy=_content_policy(scripts),
        style=_asset("style.css"),
        title=join(run.name),
        facts=facts(run),
        headline=headline(run),
        failures=failure_section(run),
        guards=guard_section(run),
        notes=notes_section(run),
        checks=checks_section(review(run)),
        curves=curves.html or element("p", "No metric was logged.", class_="note"),
        times=times.html or element("p", "No seconds were logged.", class_="note"),
        plan=plan_section(run),
        recipe=element("pre", run.recipe_text)
        if run.recipe_text
        else element("p", "config.yaml is missing.", class_="note"),
        samples_note=element("p", _samples_note(run), class_="note"),
        chart_data=json_block("chart-data", {**curves.data, **times.data}),
        sample_data=json_block("sample-data", [step.to_json() for step in run.samples.steps]),
        boot=_script(scripts[0]),
        scripts=join(*(_script(script) for script in scripts[1:])),
    )
    # A response may hold half a surrogate pair, which UTF-8 cannot.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _samples_note(run: RunFiles) -> str:
    samples = run.samples
    if not samples.steps:
        return "No sample was recorded."
    sentences = [f"A response is correct when its reward says so: {run.judge}."]
    if len(samples.steps) < samples.num_recorded_steps:
        sentences.append(
            f"{samples.num_recorded_steps} steps were recorded; {len(samples.steps)} of them, evenly spread from the "
            f"first to the last, are on this page, to stay within {samples.budget_bytes / 1e6:g} MB. "
            "The others are in samples/."
        )
    left_out = _num_left_out(samples)
    if left_out:
        sentences.append(f"Of the steps shown, {left_out:,} samples are left out to stay within that size.")
    return " ".join(sentences)


def _num_left_out(samples: Samples) -> int:
    return sum(step.num_recorded for step in samples.steps) - samples.num_samples


def _asset(name: str) -> str:
    return (files("leaderless.observability.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    source: str = get_plotlyjs()
    # An HTML parser reads every line end as \n, and the script must match its hash after that.
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _script(source: str) -> Html:
    assert "</script" not in source.lower()
    return Html(f"<script>{source}</script>")


def _content_policy(scripts: list[str]) -> str:
    """A policy under which the page loads nothing and runs these scripts only, whatever the run's texts hold."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
