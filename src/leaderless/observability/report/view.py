"""Plain values about a run for the templates of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from leaderless.observability.clock import by_pool, in_short
from leaderless.observability.evaluations import ROW_TITLES, score_row
from leaderless.observability.report.charts import TIME_PATTERN, Chart, Unit, charts_of
from leaderless.observability.report.curves import MAX_POINTS, Numbers, Series, all_steps, mean_per_run, thin
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.unchecked_values import as_list, as_mapping, as_number, as_step, as_text

MAX_EVENTS = 40
"""Largest number of events of a kind that are listed."""
MAX_STACK_POINTS = 400
"""Points of the stacked chart of seconds; longer runs show means."""
MAX_STACK_PARTS = 8
"""Parts of that chart, as many as there are colors."""
OUTSIDE_STEP = frozenset({"evaluate", "checkpoint"})
"""Work of a worker between steps, which `time/step` does not include."""
_FAILURES = {"restart": "started again", "stall": "nothing moved", "resumed": "back at work"}
_ACTIONS = {"warn": "warning", "skip": "skipped update", "roll_back": "roll-back", "stop": "stop"}

Figure = tuple[str, str, str]
"""A number that sums a run up: its name, its value, and a detail such as its change."""
Events = tuple[str, Sequence[Sequence[str]]]
"""A sentence that sums events up, and the rows of their table; no rows if there were no events."""
Part = tuple[str, str, str, int, float]
"""A part of a step that takes time: name, median and longest seconds, number of times, and share of all seconds."""


class Card(NamedTuple):
    """A chart on the page.

    `identifier` is the id of its element, `shown` its values in short, `described` a description for those who cannot
    see it, and `data` what the page's script draws.
    """

    identifier: str
    title: str
    shown: str
    explanation: str
    described: str
    data: Mapping[str, object]


def facts(run: RunFiles) -> dict[str, str]:
    """Workflow, models, ranks and time, as far as they are known."""
    models = {key[1]: path for key, path in run.settings.items() if key[0] == "models" and key[2:] == ("path",)}
    is_one = len(set(models.values())) == 1
    known = {
        "Workflow": as_text(run.plan.get("workflow")) or run.settings.get(("workflow",), ""),
        "Model": next(iter(models.values())) if is_one else ", ".join(map(" ".join, models.items())),
        "World size": as_text(run.plan.get("world_size")),
        "Seed": run.settings.get(("seed",), ""),
        "Last step logged": f"{run.last_logged:%Y-%m-%d %H:%M} UTC" if run.last_logged else "",
    }
    return {term: value for term, value in known.items() if value}


def figures(run: RunFiles) -> Iterator[Figure]:
    """The figures that sum a run up."""
    accuracies = run.matching("evaluation/mean@*", "evaluation/pass@*", "evaluation/maj@*")
    for name in list(accuracies)[:1]:
        yield from _change(f"Held-out {name.removeprefix('evaluation/')}", accuracies[name], "share")
    yield from _change("Reward", run.series.get("reward/mean"), "number")
    if "reward/mean" not in run.series:
        yield from _change("Loss", run.series.get("policy/loss"), "number")
    yield from _change("Response length, tokens", run.series.get("rollout/response_tokens"), "number")
    if run.steps:
        planned = run.settings.get(("steps",))
        yield "Last step", f"{run.steps[-1]:,}", f"of {planned} planned" if planned else ""
    if run.duration_s is not None:
        seconds = _median(run.series.get("time/step"))
        pace = f"{format_number(seconds)} s per step, median" if seconds else ""
        yield "Duration", format_duration(run.duration_s), pace
    speed = _median(run.series.get("throughput/tokens_per_s"))
    if speed is not None:
        yield "Tokens per second", f"{speed:,.0f}", "median of the run"


def failures(run: RunFiles) -> Events:
    """Failures, stalls and restarts."""
    events = [event for event in run.events if as_text(event.get("event")) in _FAILURES]
    lost = sum(int(as_number(event.get("lost_steps")) or 0) for event in events)
    times = sum(event.get("event") == "restart" for event in events)
    summary = f"Workers were started again {times} time{'s' * (times != 1)}; {lost} steps had to be done again."
    columns: dict[str, Callable[[object], str]] = {
        "time": lambda time: as_text(time)[:19].replace("T", " "),
        "event": lambda event: _FAILURES[as_text(event)],
        "rank": _whole,
        "cause": as_text,
        "from_step": _whole,
        "seconds": _seconds,
    }
    return summary, _rows(events, columns)


def guards(run: RunFiles) -> Events:
    """Observations and actions of guards."""
    events = [event for event in run.events if event.get("event") == "guard"]
    actions = Counter(as_text(event.get("action")) for event in events)
    counts = ", ".join(f"{actions[a]} {noun}" + "s" * (actions[a] > 1) for a, noun in _ACTIONS.items() if actions[a])
    left_out = f" The last {MAX_EVENTS} are listed; all are in events.jsonl." if len(events) > MAX_EVENTS else ""
    columns = {"step": _whole, "guard": as_text, "value": lambda value: _shown(value) or "not finite"}
    rows = _rows(events, columns | {"limit": _shown, "node": as_text, "action": as_text})
    return f"Guards have acted: {counts}.{left_out}", rows


def switches(run: RunFiles) -> Events:
    """Layouts that have replaced each other while the run went on."""
    events = [event for event in run.events if event.get("event") == "switch"]
    summary = f"The layout was replaced {len(events)} time{'s' * (len(events) != 1)} while the run went on."
    columns = {"step": _whole, "from": as_text, "to": as_text}
    return summary, _rows(events, columns | dict.fromkeys(("now_s", "expected_s", "seconds"), _seconds))


def evaluations(run: RunFiles) -> Events:
    """What other packages have measured, the newest first."""
    rows = [
        (*score_row(score), Path(one.weights).name, one.by, one.time[:16].replace("T", " "))
        for one in run.evaluations
        for score in one.scores
    ]
    left_out = f" {len(rows) - MAX_EVENTS} more numbers are in evaluations/." if len(rows) > MAX_EVENTS else ""
    return f"Measured by packages of others, value ± standard error.{left_out}", rows[:MAX_EVENTS]


EVALUATION_TITLES = (*ROW_TITLES, "Weights", "By", "Time (UTC)")
"""Titles of the columns of `evaluations`."""


def _rows(
    events: Sequence[Mapping[str, object]], columns: Mapping[str, Callable[[object], str]]
) -> Sequence[Sequence[str]]:
    """The newest events as the rows of a table, whose columns read values by name."""
    return [[read(event.get(name)) for name, read in columns.items()] for event in events[-MAX_EVENTS:]]


def _whole(value: object) -> str:
    return as_text(as_step(value))


def _seconds(value: object) -> str:
    return f"{shown} s" if (shown := _shown(value)) else ""


def curves(run: RunFiles) -> tuple[Sequence[tuple[str, Sequence[Card]]], Sequence[str]]:
    """All curves under their headings, and notes on them."""
    found, num_left_out = charts_of(run)
    numbers = count()
    groups = [(title, [curve_card(f"chart-{next(numbers)}", chart) for chart in charts]) for title, charts in found]
    notes = []
    if max((len(one) for one in run.series.values()), default=0) > MAX_POINTS:
        notes.append(f"Curves of more than {MAX_POINTS:,} points are thinned; the lowest and highest values are kept.")
    if num_left_out:
        notes.append(f"{num_left_out} more metrics are in metrics.jsonl and are not drawn here.")
    return groups, notes


def times(run: RunFiles) -> tuple[Card | None, Sequence[Part]]:
    """Use of the seconds of a step: a stacked chart over the steps, and the rows of a table."""
    parts = {name.removeprefix("time/"): one for name, one in run.matching(TIME_PATTERN).items()}
    whole = parts.pop("step", None)
    if not parts and whole is None:
        return None, ()
    chains = as_mapping(run.plan.get("chains")).values()
    planned = list(dict.fromkeys(as_text(action) for chain in chains for action in as_list(chain)))
    order = sorted(parts, key=lambda name: (planned.index(name) if name in planned else len(planned), name))
    ordered = {name: parts[name] for name in order}
    every = ordered if whole is None else {**ordered, "step": whole}
    steps, means = mean_per_run(every, MAX_STACK_POINTS)
    total = means.pop("step", None)
    data = {
        "kind": "stack",
        "steps": steps,
        "parts": [{"name": name, "values": rounded(values)} for name, values in _stacked(means).items()],
        "total": None if total is None else rounded(total),
    }
    explanation = (
        "Stacked by what a rank does. The line is the whole step; evaluation and checkpoints come on top of it, "
        "and what different ranks do at the same time is stacked too."
    )
    if len(all_steps(every.values())) > MAX_STACK_POINTS:
        explanation += " Each point is a mean over neighboring steps."
    shown = "" if whole is None else f"whole step {_first_and_last(whole, 'number')} s"
    described = f"Stacked seconds per step of {', '.join(ordered) or 'the whole step'}"
    card = Card("chart-time", "Seconds per step", shown, explanation, described, data)
    return card, _time_table(ordered, whole)


def pools(run: RunFiles) -> list[Card]:
    """Use of the seconds of each pool of ranks: a stacked chart over the steps for each."""
    cards = []
    for number, (pool, names) in enumerate(by_pool(run.series).items()):
        steps, means = mean_per_run({state: run.series[name] for state, name in names.items()}, MAX_STACK_POINTS)
        parts = [{"name": state, "values": rounded(values)} for state, values in _stacked(means).items()]
        totals = {state: sum(values) for state, values in means.items()}
        cards.append(
            Card(
                f"chart-pool-{number}",
                f"Seconds of ranks {pool}",
                in_short(totals),
                "Stacked by state, the mean over these ranks; all states together are the time that has passed.",
                f"Stacked seconds of ranks {pool} in the states {', '.join(names)}",
                {"kind": "stack", "steps": steps, "parts": parts, "total": None},
            )
        )
    return cards


def format_number(value: float) -> str:
    """A finite number for a reader, with four digits."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.2e}"


def format_bytes(value: object) -> str:
    """A number of bytes for a reader; a dash for anything else."""
    number = as_number(value)
    if number is None:
        return "–"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if number < 1023.5:
            break
        number, unit = number / 1024, larger
    return f"{number:.1f} {unit}" if number < 10 and unit != "B" else f"{number:,.0f} {unit}"


def format_duration(seconds: float) -> str:
    """A time span for a reader."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _shown(value: object) -> str:
    """A number of an event; empty for anything else."""
    number = as_number(value)
    return "" if number is None else format_number(number)


def _format(value: float, unit: Unit) -> str:
    return f"{value:.1%}" if unit == "share" else format_number(value)


def _median(series: Series | None) -> float | None:
    return float(np.median(series.finite.value_array)) if series and series.finite else None


def _change(label: str, series: Series | None, unit: Unit) -> Iterator[Figure]:
    """The last value of a metric and its change since the first."""
    if series is None or not series.finite:
        return
    (first_step, first), (_, last) = series.finite.point(0), series.finite.point(-1)
    since = f"since step {first_step} ({_format(first, unit)})"
    if len(series.finite) == 1:
        since = f"at step {first_step}, the only value"
    elif unit == "share":
        since = f"{100 * (last - first):+.1f} points {since}"
    else:
        since = f"{'+' if last >= first else '−'}{format_number(abs(last - first))} {since}"
    yield label, _format(last, unit), since


def _first_and_last(series: Series, unit: Unit) -> str:
    if not series.finite:
        return "no finite value"
    first, last = (_format(series.finite.point(place)[1], unit) for place in (0, -1))
    return last if len(series.finite) == 1 else f"{first} → {last}"


def _stacked(means: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The parts that take most, each with its color, and all others together."""
    largest = sorted(means, key=lambda name: -sum(means[name]))[: MAX_STACK_PARTS - 1]
    others = [values for name, values in means.items() if name not in largest]
    if len(others) < 2:
        return dict(means)
    stacked = {name: values for name, values in means.items() if name in largest}
    return stacked | {f"{len(others)} others": [sum(values) for values in zip(*others, strict=True)]}


def curve_card(identifier: str, chart: Chart, labels: Sequence[str] = ()) -> Card:
    """The card of a chart, whose curves have these labels, or the last parts of the names of their metrics."""
    topic, series = chart.topic, chart.series
    described = f"{topic.title} over steps: " + "; ".join(_described(name, one) for name, one in series.items())
    data = {
        "kind": "curves",
        "unit": topic.unit,
        "is_log": topic.is_log,
        "traces": [_trace(label, one) for label, one in zip(_labels(chart, labels), series.values(), strict=True)],
        "band": None if chart.band is None else _band(next(iter(series.values())), chart.band),
    }
    explanation = topic.explanation or next(iter(series))
    return Card(identifier, topic.title, shown_values(chart, labels), explanation, described, data)


def shown_values(chart: Chart, labels: Sequence[str] = ()) -> str:
    """The values of a chart in short: the first and the last of a curve, or the last of each of several."""
    unit, series = chart.topic.unit, chart.series
    if len(series) == 1:
        return _first_and_last(next(iter(series.values())), unit)
    last = [_format(one.finite.point(-1)[1], unit) if one.finite else "–" for one in series.values()]
    return ", ".join(f"{label} {value}" for label, value in zip(_labels(chart, labels), last, strict=True))


def _labels(chart: Chart, labels: Sequence[str]) -> Sequence[str]:
    """Names of the curves of a chart, which differ."""
    labels = labels or [name.rpartition("/")[2] for name in chart.series]
    return labels if len(set(labels)) == len(labels) else list(chart.series)


def _band(center: Series, half: Series) -> Mapping[str, object]:
    """A band around a series, whose half width is known at some of its steps."""
    steps, here, there = np.intersect1d(
        center.finite.step_array, half.finite.step_array, assume_unique=True, return_indices=True
    )
    middle, by = center.finite.value_array[here], half.finite.value_array[there]
    return {"low": _trace("low", Series(steps, middle - by)), "high": _trace("high", Series(steps, middle + by))}


def _trace(name: str, series: Series) -> Mapping[str, object]:
    thinned = thin(series)
    return {"name": name, "steps": list(thinned.steps), "values": rounded(thinned.values)}


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Values with six digits, which are more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _described(name: str, series: Series) -> str:
    if not series.finite:
        return f"{name} has no finite value"
    (first_step, first), (last_step, last) = series.finite.point(0), series.finite.point(-1)
    low, high = float(series.finite.value_array.min()), float(series.finite.value_array.max())
    return (
        f"{name} from {format_number(first)} at step {first_step} to {format_number(last)} at step {last_step}, "
        f"lowest {format_number(low)}, highest {format_number(high)}"
    )


def _time_table(parts: Mapping[str, Series], whole: Series | None) -> Sequence[Part]:
    values = {name: one.finite.value_array for name, one in parts.items()}
    totals = {name: float(numbers.sum()) for name, numbers in values.items()}
    on_top = sum(total for name, total in totals.items() if name in OUTSIDE_STEP)
    all_seconds = on_top + float(whole.finite.value_array.sum()) if whole else sum(totals.values())
    rows = []
    for name in sorted(parts, key=lambda name: -totals[name]):
        numbers: Numbers = values[name] if len(values[name]) else np.zeros(1)
        share = totals[name] / all_seconds if all_seconds > 0 else 0.0
        median, longest = format_number(float(np.median(numbers))), format_number(float(numbers.max()))
        rows.append((name, median, longest, len(values[name]), share))
    return rows
