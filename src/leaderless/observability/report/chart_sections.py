"""The curves' part of the page: a card per chart, and the data that the page's script draws."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from leaderless.observability.report.catalogue import TIME_PATTERN, Chart, Unit, charts_of
from leaderless.observability.report.curves import MAX_POINTS, Series, mean_per_run, thin
from leaderless.observability.report.markup import Html, element, format_number, join
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.untrusted import as_list, as_mapping, as_text

MAX_STACK_POINTS = 400
"""Points of the stacked picture of seconds; longer runs show means."""
MAX_STACK_PARTS = 8
"""Parts of that picture, as many as there are colours."""


HOW_TO_READ = (
    "Horizontal axis: step. Drag over a stretch to zoom all curves to it, double-click to see all again, click a point "
    "to read that step's samples. Smoothing is set in the bar above; raw values stay visible behind it."
)
OUTSIDE_STEP = frozenset({"evaluate", "checkpoint"})
"""What a worker does between steps; `time/step` does not hold it."""


@dataclass(frozen=True)
class ChartSection:
    """Charts as HTML, and their data by the id of the element that each is drawn in."""

    html: Html
    data: Mapping[str, object]


def curves_section(run: RunFiles) -> ChartSection:
    """All curves, grouped.

    Args:
        run: What was read of the run.
    """
    groups, num_left_out = charts_of(run)
    data: dict[str, object] = {}
    parts = [element("p", HOW_TO_READ, class_="note")] if groups else []
    for group in groups:
        cards: list[Html] = []
        for chart in group.charts:
            identifier = f"chart-{len(data)}"
            data[identifier] = _curve_data(chart)
            cards.append(_curve_card(identifier, chart))
        parts.append(element("h3", group.title))
        parts.append(element("div", *cards, class_="charts"))
    notes = []
    longest = max((len(one.steps) for one in run.series.values()), default=0)
    if longest > MAX_POINTS:
        notes.append(f"Curves of more than {MAX_POINTS:,} points are thinned; the lowest and highest values are kept.")
    if num_left_out:
        notes.append(f"{num_left_out} more metrics are in metrics.jsonl and are not drawn here.")
    parts += [element("p", note, class_="note") for note in notes]
    return ChartSection(join(*parts), data)


def time_section(run: RunFiles) -> ChartSection:
    """Where the seconds of a step go: a stacked picture over the steps, and a table.

    Args:
        run: What was read of the run.
    """
    times = {name.removeprefix("time/"): one for name, one in run.matching(TIME_PATTERN).items()}
    whole = times.pop("step", None)
    if not times and whole is None:
        return ChartSection(Html(""), {})
    ordered = {name: times[name] for name in _execution_order(run, times)}
    every = ordered if whole is None else {**ordered, "step": whole}
    steps, means = mean_per_run(every, MAX_STACK_POINTS)
    total = means.pop("step", None)
    data = {
        "kind": "stack",
        "steps": steps,
        "parts": [{"name": name, "values": _rounded(values)} for name, values in _stacked(means).items()],
        "total": None if total is None else _rounded(total),
    }
    explanation = (
        "Stacked by what a rank does. The line is the whole step; evaluation and checkpoints come on top of it, "
        "and what different ranks do at the same time is stacked too."
    )
    if len({step for one in every.values() for step in one.steps}) > MAX_STACK_POINTS:
        explanation += " Each point is a mean over neighbouring steps."
    shown = "" if whole is None else f"whole step {summary(whole, 'number')} s"
    described = f"Stacked seconds per step of {', '.join(ordered) or 'the whole step'}"
    card = _card("chart-time", "Seconds per step", explanation, shown, described)
    return ChartSection(join(card, _time_table(ordered, whole)), {"chart-time": data})


def summary(series: Series, unit: Unit) -> str:
    """The first and the last value of a curve, for a reader.

    Args:
        series: The curve.
        unit: How to write its values.
    """
    if not series.finite:
        return "no finite value"
    first, last = series.finite[0][1], series.finite[-1][1]
    return (
        format_value(last, unit)
        if len(series.finite) == 1
        else f"{format_value(first, unit)} → {format_value(last, unit)}"
    )


def format_value(value: float, unit: Unit) -> str:
    """A value for a reader.

    Args:
        value: Finite.
        unit: `share` writes 0.25 as 25 %.
    """
    return f"{value:.1%}" if unit == "share" else format_number(value)


def _execution_order(run: RunFiles, times: Mapping[str, Series]) -> list[str]:
    """As the chains of the plan have it, then what the worker does around them."""
    chains = as_mapping(run.plan.get("chains")).values()
    planned = list(dict.fromkeys(as_text(action) for chain in chains for action in as_list(chain)))
    return sorted(times, key=lambda name: (planned.index(name) if name in planned else len(planned), name))


def _stacked(means: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The parts that take most, one colour each, and all others together."""
    largest = sorted(means, key=lambda name: -sum(means[name]))[: MAX_STACK_PARTS - 1]
    others = [name for name in means if name not in largest]
    if len(others) < 2:
        return dict(means)
    stacked = {name: values for name, values in means.items() if name in largest}
    together = [sum(values) for values in zip(*(means[name] for name in others), strict=True)]
    return stacked | {f"{len(others)} others": together}


def _curve_data(chart: Chart) -> dict[str, object]:
    thinned = {name: thin(one) for name, one in chart.series.items()}
    band = None
    if chart.band is not None:
        centre, half = next(iter(chart.series.values())), dict(chart.band.finite)
        edges = [(step, value, half[step]) for step, value in centre.finite if step in half]
        low = thin(Series(tuple(s for s, _, _ in edges), tuple(v - h for _, v, h in edges)), MAX_POINTS)
        high = thin(Series(tuple(s for s, _, _ in edges), tuple(v + h for _, v, h in edges)), MAX_POINTS)
        band = {"low": _trace("low", low), "high": _trace("high", high)}
    return {
        "kind": "curves",
        "unit": chart.topic.unit,
        "is_log": chart.topic.is_log,
        "traces": [_trace(_short(name), one) for name, one in thinned.items()],
        "band": band,
    }


def _short(metric: str) -> str:
    return metric.rpartition("/")[2]


def _last(series: Series, unit: Unit) -> str:
    return format_value(series.finite[-1][1], unit) if series.finite else "–"


def _trace(name: str, series: Series) -> dict[str, object]:
    return {"name": name, "steps": list(series.steps), "values": _rounded(series.values)}


def _rounded(values: tuple[float | None, ...] | list[float]) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _curve_card(identifier: str, chart: Chart) -> Html:
    names = list(chart.series)
    if len(names) == 1:
        shown = summary(chart.series[names[0]], chart.topic.unit)
    else:
        shown = ", ".join(f"{_short(name)} {_last(one, chart.topic.unit)}" for name, one in chart.series.items())
    described = (
        f"{chart.topic.title} over steps: {'; '.join(_described(name, one) for name, one in chart.series.items())}"
    )
    explanation = chart.topic.explanation or names[0]
    return _card(identifier, chart.topic.title, explanation, shown, described)


def _described(name: str, series: Series) -> str:
    if not series.finite:
        return f"{name} has no finite value"
    (first_step, first), (last_step, last) = series.finite[0], series.finite[-1]
    low, high = min(value for _, value in series.finite), max(value for _, value in series.finite)
    return (
        f"{name} from {format_number(first)} at step {first_step} to {format_number(last)} at step {last_step}, "
        f"lowest {format_number(low)}, highest {format_number(high)}"
    )


def _card(identifier: str, title: str, explanation: str, shown: str, described: str) -> Html:
    return element(
        "figure",
        element(
            "figcaption",
            element("h4", title),
            element("p", shown, class_="from-to"),
            element("p", explanation, class_="explanation"),
        ),
        element("div", class_="plot", id=identifier, role="img", aria_label=described),
        class_="chart",
    )


def _time_table(times: Mapping[str, Series], whole: Series | None) -> Html:
    totals = {name: sum(value for _, value in one.finite) for name, one in times.items()}
    on_top = sum(total for name, total in totals.items() if name in OUTSIDE_STEP)
    all_seconds = on_top + sum(value for _, value in whole.finite) if whole else sum(totals.values())
    rows = [
        element("tr", element("th", name, scope="row"), *_time_cells(times[name], totals[name], all_seconds))
        for name in sorted(times, key=lambda name: -totals[name])
    ]
    head = [
        element("th", title, scope="col") for title in ("Part", "Median seconds", "Longest", "Times", "Share of all")
    ]
    return element(
        "div",
        element("table", element("thead", element("tr", *head)), element("tbody", *rows), class_="numbers"),
        class_="scroll",
    )


def _time_cells(series: Series, total: float, all_seconds: float) -> Iterator[Html]:
    values = [value for _, value in series.finite]
    share = total / all_seconds if all_seconds > 0 else 0.0
    bar = element("meter", value=f"{min(1.0, share):.4f}", aria_hidden="true")
    yield element("td", format_number(statistics.median(values)) if values else "–")
    yield element("td", format_number(max(values)) if values else "–")
    yield element("td", f"{len(values):,}")
    yield element("td", bar, f" {share:.1%}")
