"""The page as a whole: the templates in `assets`, filled with what is known about a run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from leaderless.observability.report import view
from leaderless.observability.report.checks import review
from leaderless.observability.report.run_files import RunFiles, read_run
from leaderless.observability.report.unchecked_values import as_list, as_mapping, as_text, embedded_json

FILE_NAME = "report.html"
"""Name of the page in a run directory."""


def write_report(run_directory: Path) -> Path:
    """Write `report.html` into a run directory, or as much of it as there is; returns the page's path.

    A reader sees the old page or the new one, never a part. A ValueError says that there is no such directory.
    """
    from leaderless.observability.run_directory import write_atomically  # needs libraries that rendering does not

    target, page = run_directory / FILE_NAME, render_report(run_directory)
    write_atomically(target, page)
    return target


def render_report(run_directory: Path) -> str:
    """The report about a run as one self-contained HTML page, which says what is missing in the directory.

    A ValueError says that there is no such directory.
    """
    if not run_directory.is_dir():
        raise ValueError(f"run directory '{run_directory}': there is no such directory; name one under `run.directory`")
    run = read_run(run_directory)
    scripts, policy = _scripts()
    return render("page.html", **report_values(run, *view.curves(run)), policy=policy, scripts=scripts)


def render(template: str, **values: object) -> str:
    """A page: a template filled with values."""
    style = Markup(asset("style.css"))  # noqa: S704 - a file of this package
    page = environment().get_template(template).render(style=style, **values)
    # A response may hold half a surrogate pair, which UTF-8 cannot encode.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def report_values(
    run: RunFiles, curves: Sequence[tuple[str, Sequence[view.Card]]], curve_notes: Sequence[str]
) -> dict[str, object]:
    """Values for the templates of a page about one run, given its curves under their headings and notes on them."""
    times, parts = view.times(run)
    pools = view.pools(run)
    cards = [card for _, group in curves for card in group] + ([times] if times else []) + pools
    return {
        **outcome_values(run),
        "picture": Markup(run.picture),  # noqa: S704 - reduced by `clean_svg` to what draws
        "facts": view.facts(run),
        "curves": curves,
        "curve_notes": curve_notes,
        "times": times,
        "parts": parts,
        "pools": pools,
        "chart_data": json_of({card.identifier: card.data for card in cards}),
        "sample_data": json_of([asdict(step) for step in run.samples.steps]),
        "held_out_data": json_of([asdict(step) for step in run.held_out.steps]),
    }


def outcome_values(run: RunFiles) -> dict[str, object]:
    """Values for the template of the outcome of a run."""
    return {
        "run": run,
        "figures": view.figures(run),
        "failures": view.failures(run),
        "guards": view.guards(run),
        "switches": view.switches(run),
        "evaluations": view.evaluations(run),
        "evaluation_titles": view.EVALUATION_TITLES,
        "review": review(run),
    }


@cache
def environment() -> Environment:
    """Templates that escape every value, and fail where a value is missing; each is compiled once."""
    environment = Environment(
        loader=PackageLoader("leaderless.observability.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"text": as_text, "items_of": as_list, "mapping": as_mapping, "size": view.format_bytes}
    return environment


def asset(name: str) -> str:
    """A file of the templates."""
    return (files("leaderless.observability.report") / "assets" / name).read_text(encoding="utf-8")


def plotly() -> str:
    """The script that draws charts."""
    source: str = get_plotlyjs()
    # An HTML parser reads every line end as \n; only then is the script compared with its hash.
    return source.replace("\r\n", "\n").replace("\r", "\n")


def json_of(value: object) -> Markup:
    """Data for the page's scripts, in which no text can end the script element."""
    return Markup(embedded_json(value))  # noqa: S704


@cache
def _scripts() -> tuple[Sequence[Markup], str]:
    """The scripts of a report, and the policy that allows them: megabytes, the same for all reports of a process."""
    sources = [asset("boot.js"), plotly(), asset("charts.js"), asset("samples.js")]
    # Not `source.lower()`, which copies megabytes character by character.
    assert not any(rest[:6].lower() == "script" for source in sources for rest in source.split("</")[1:])
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # The page loads nothing and runs only these scripts, whatever the texts of the run hold.
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    return [Markup(source) for source in sources], policy  # noqa: S704 - files of this package, and Plotly's
