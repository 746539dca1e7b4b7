"""The top of the page: what run this is, how it went, and what is worth a look."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from leaderless.observability.report.catalogue import Unit
from leaderless.observability.report.chart_sections import format_value
from leaderless.observability.report.checks import Finding, Review
from leaderless.observability.report.curves import Series
from leaderless.observability.report.markup import Html, element, format_duration, format_number, join
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.untrusted import as_text

MAX_NOTES = 12
"""Notes about missing or broken files that are written out."""


def facts(run: RunFiles) -> Html:
    """Workflow, models, ranks and time, as a list of terms.

    Args:
        run: What was read of the run.
    """
    models = list(dict.fromkeys(run.models.values()))
    known = {
        "Workflow": run.workflow,
        "Model": models[0] if len(models) == 1 else ", ".join(f"{role} {path}" for role, path in run.models.items()),
        "World size": as_text(run.plan.get("world_size")),
        "Seed": run.settings.get(("seed",), ""),
        "Last step logged": f"{run.last_logged:%Y-%m-%d %H:%M} UTC" if run.last_logged else "",
    }
    return element(
        "dl",
        *(element("div", element("dt", term), element("dd", value)) for term, value in known.items() if value),
        class_="facts",
    )


def headline(run: RunFiles) -> Html:
    """The few figures that sum a run up.

    Args:
        run: What was read of the run.
    """
    return element("div", *_figures(run), class_="figures")


def checks_section(review: Review) -> Html:
    """What is worth a look, or that nothing is.

    Args:
        review: The outcome of all checks.
    """
    parts: list[Html] = [_finding(finding) for finding in review.findings]
    if not parts and review.passed:
        parts.append(element("p", "Nothing to worry about: all checks that could be made have passed.", class_="fine"))
    if not parts:
        parts.append(element("p", "Nothing could be checked yet: no metric was logged.", class_="note"))
    outcomes = (
        ("Passed", review.passed),
        ("Not checked: the run has no such part, or logged too little", review.not_made),
    )
    lists = [
        join(element("h3", title), element("ul", *(element("li", rule) for rule in rules)))
        for title, rules in outcomes
        if rules
    ]
    summary = f"{len(review.passed)} checks passed, {len(review.not_made)} could not be made"
    parts.append(element("details", element("summary", summary), *lists))
    return join(*parts)


def notes_section(run: RunFiles) -> Html:
    """What the run directory lacks; nothing if it is complete.

    Args:
        run: What was read of the run.
    """
    if not run.notes:
        return Html("")
    shown = [element("li", note) for note in run.notes[:MAX_NOTES]]
    if len(run.notes) > MAX_NOTES:
        shown.append(element("li", f"… and {len(run.notes) - MAX_NOTES} more."))
    return element(
        "section",
        element("h2", "What is missing", id="missing-title"),
        element("ul", *shown),
        id="missing",
        aria_labelledby="missing-title",
    )


def _finding(finding: Finding) -> Html:
    example = [element("pre", finding.example, class_="example", tabindex="0")] if finding.example else []
    return element(
        "article",
        element("h3", finding.title),
        element("p", finding.seen, class_="seen"),
        *example,
        element("p", finding.meaning),
        element("p", element("strong", "What to do: "), finding.remedy),
        class_="finding",
    )


def _figures(run: RunFiles) -> Iterator[Html]:
    accuracies = run.matching("evaluation/mean@*", "evaluation/pass@*", "evaluation/maj@*")
    for name in list(accuracies)[:1]:
        yield from _change(f"Held-out {name.removeprefix('evaluation/')}", accuracies[name], "share")
    yield from _change("Reward", run.series.get("reward/mean"), "number")
    if not {"reward/mean"} & run.series.keys():
        yield from _change("Loss", run.series.get("policy/loss"), "number")
    yield from _change("Response length, tokens", run.series.get("rollout/response_tokens"), "number")
    yield from _pace(run)


def _pace(run: RunFiles) -> Iterator[Html]:
    if run.steps:
        planned = f"of {run.planned_steps} planned" if run.planned_steps else ""
        yield _figure("Last step", f"{run.steps[-1]:,}", planned)
    if run.duration_s is not None:
        step = run.series.get("time/step")
        median = statistics.median(value for _, value in step.finite) if step and step.finite else None
        yield _figure(
            "Duration", format_duration(run.duration_s), f"{format_number(median)} s per step, median" if median else ""
        )
    speed = run.series.get("throughput/tokens_per_s")
    if speed and speed.finite:
        median = statistics.median(value for _, value in speed.finite)
        yield _figure("Tokens per second", f"{median:,.0f}", "median of the run")


def _change(label: str, series: Series | None, unit: Unit) -> Iterator[Html]:
    """The last value of a metric and its change since the first."""
    if series is None or not series.finite:
        return
    (first_step, first), (_, last) = series.finite[0], series.finite[-1]
    if len(series.finite) == 1:
        since = f"at step {first_step}, the only value"
    elif unit == "share":
        since = f"{100 * (last - first):+.1f} points since step {first_step} ({format_value(first, unit)})"
    else:
        sign = "+" if last >= first else "−"
        since = f"{sign}{format_number(abs(last - first))} since step {first_step} ({format_value(first, unit)})"
    yield _figure(label, format_value(last, unit), since)


def _figure(label: str, value: str, detail: str) -> Html:
    return element(
        "div",
        element("p", label, class_="label"),
        element("p", value, class_="value"),
        element("p", detail, class_="detail"),
        class_="figure",
    )
