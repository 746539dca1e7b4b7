"""The charts of one run, or of several laid over one another, and what is new on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from leaderless.observability.clock import PREFIX
from leaderless.observability.report.charts import MAX_OWN_CHARTS, Chart, Topic, charts_of, matched
from leaderless.observability.report.curves import Series
from leaderless.observability.report.run_files import Logged, RunFiles, flatten_recipe, read_run
from leaderless.observability.report.samples import JudgeView, Samples
from leaderless.observability.report.view import Card, curve_card, rounded, shown_values
from leaderless.serving.live_page.metric_table import AllSeries, StepTable

SAMPLE_BUDGETS = 1_500_000, 400_000
"""Largest sizes of the samples of training and of held-out prompts on a live page, in bytes."""
MAX_ADDED = 2000
"""Number of points that are added to a chart before all of its points are chosen anew."""

_NOTHING = Series((), ())

Groups = list[tuple[str, list[Card]]]
Data = Mapping[str, object]


class _Curve(NamedTuple):
    """A curve of a chart: the place of its run, and its metric."""

    place: int
    metric: str


class _Plot(NamedTuple):
    """A chart: what its curves are, and the metric of its band."""

    curves: tuple[_Curve, ...]
    band: str | None

    @property
    def metrics(self) -> tuple[_Curve, ...]:
        """All that it is drawn from."""
        return self.curves if self.band is None else (*self.curves, _Curve(self.curves[0].place, self.band))


class Board:
    """Charts of some runs, as one reader has them; `news` says what to add."""

    def __init__(self, tables: Mapping[str, StepTable]) -> None:
        self._names, self._tables = list(tables), list(tables.values())
        self._begin()

    def _begin(self) -> None:
        self._rows = [len(table) for table in self._tables]
        self._first_rows = list(self._rows)
        self._generations = [table.generation for table in self._tables]
        self._revisions = [dict(table.revisions) for table in self._tables]
        self._known = [set(table.names) for table in self._tables]
        self._titles: list[tuple[str, list[str]]] = []
        self._charts: dict[str, tuple[Chart, _Plot]] = {}
        for title, charts in _charts([dict.fromkeys(table.names, _NOTHING) for table in self._tables]):
            named = {f"chart-{len(self._charts) + number}": chart for number, chart in enumerate(charts)}
            self._titles.append((title, list(named)))
            self._charts |= named

    def groups(self) -> Groups:
        """Charts under headings, with all points that the tables have now."""
        return [(title, [self._card(identifier) for identifier in named]) for title, named in self._titles]

    def everything(self) -> dict[str, Data]:
        """Charts for a page that shows other points."""
        return {identifier: _anew(self._card(identifier)) for identifier in self._charts}

    @property
    def structure(self) -> list[tuple[str, object]]:
        """Which curves each chart has."""
        return [(identifier, plot) for identifier, (_, plot) in self._charts.items()]

    def news(self) -> tuple[dict[str, Data], bool]:
        """News since the last call, by chart, and whether the page has to be loaded again for other charts."""
        if any(set(table.names) != known for table, known in zip(self._tables, self._known, strict=True)):
            return {}, True
        has_dropped = [table.generation for table in self._tables] != self._generations
        added = max(len(table) - first for table, first in zip(self._tables, self._first_rows, strict=True))
        if has_dropped or added > MAX_ADDED:
            self._begin()
            return self.everything(), False
        found: dict[str, Data] = {}
        revised = self._revised()
        for identifier, (_, plot) in self._charts.items():
            if not revised.isdisjoint(plot.metrics):
                found[identifier] = _anew(self._card(identifier))
                continue
            added_points = [self._tables[c.place].since(c.metric, self._rows[c.place]) for c in plot.curves]
            if any(steps for steps, _ in added_points):
                traces = [{"steps": steps, "values": rounded(values)} for steps, values in added_points]
                shown = shown_values(self._filled(identifier), self._labels(plot))
                found[identifier] = {"traces": traces, "shown": shown, **self._band(plot)}
        self._rows = [len(table) for table in self._tables]
        return found, False

    def _revised(self) -> set[_Curve]:
        """Metrics of which other logs have added values to rows that have been sent."""
        now = [dict(table.revisions) for table in self._tables]
        found = {
            _Curve(place, name)
            for place, (revisions, before) in enumerate(zip(now, self._revisions, strict=True))
            for name, number in revisions.items()
            if number != before.get(name)
        }
        self._revisions = now
        return found

    def _card(self, identifier: str) -> Card:
        return curve_card(identifier, self._filled(identifier), self._labels(self._charts[identifier][1]))

    def _filled(self, identifier: str) -> Chart:
        """A chart with its curves as they are now."""
        chart, plot = self._charts[identifier]
        series = [self._tables[curve.place].series(curve.metric) for curve in plot.curves]
        band = None if plot.band is None else self._tables[plot.curves[0].place].series(plot.band)
        return replace(chart, series=dict(zip(chart.series, series, strict=True)), band=band)

    def _labels(self, plot: _Plot) -> list[str]:
        return [self._names[curve.place] for curve in plot.curves] if len(self._tables) > 1 else []

    def _band(self, plot: _Plot) -> Data:
        if plot.band is None:
            return {}
        place, metric = plot.curves[0]
        table, row = self._tables[place], self._rows[place]
        center, half = (
            dict(zip(*table.since(metric, row), strict=True)),
            dict(zip(*table.since(plot.band, row), strict=True)),
        )
        points = [
            (step, value, by)
            for step, value in center.items()
            if value is not None and (by := half.get(step)) is not None
        ]
        sides = {
            name: {"steps": [step for step, _, _ in points], "values": rounded([v + sign * by for _, v, by in points])}
            for name, sign in (("low", -1), ("high", 1))
        }
        return {"band": sides}


def _anew(card: Card) -> Data:
    return {"data": card.data, "shown": card.shown}


def read_live(table: StepTable, *, has_samples: bool = True) -> RunFiles:
    """All that the folder of a run holds, with the numbers that are in memory, and with or without samples."""
    times = table.seconds[~np.isnan(table.seconds)]
    passed = np.diff(times, prepend=0.0)
    passed_s = float(np.where(passed >= 0, passed, times).sum()) if len(times) else None
    logged = Logged(AllSeries(table), tuple(table.steps.tolist()), passed_s)
    return read_run(table.directory, logged, SAMPLE_BUDGETS if has_samples else None)


def differences(recipes: Sequence[str]) -> list[tuple[str, ...]]:
    """Settings that differ between recipes: the key, and its value in each; a dash where a recipe has none."""
    flat = [flatten_recipe(text) for text in recipes]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [(".".join(key), *(settings.get(key, "–") for settings in flat)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1 and row[0] != "name"]


def _charts(logged: Sequence[Mapping[str, Series]]) -> list[tuple[str, list[tuple[Chart, _Plot]]]]:
    """Charts as in the report for a single run; for several, one for each metric, with a curve for each run."""
    if len(logged) == 1:
        (series,) = logged
        found, _ = charts_of(_only(series))
        return [(title, [(chart, _plot(chart)) for chart in charts]) for title, charts in found]
    names = dict.fromkeys(name for series in logged for name in series)
    groups: dict[str, list[tuple[Chart, _Plot]]] = {}
    drawn: set[str] = set()
    for title, topic, metrics in matched(_only(dict.fromkeys(names, _NOTHING))):
        for name in (one for one in metrics if one not in drawn):
            drawn.add(name)
            groups.setdefault(title, []).append(_overlay(logged, name, topic))
    rest = [name for name in names if name not in drawn and not name.startswith(PREFIX)][:MAX_OWN_CHARTS]
    if rest:
        groups["More metrics"] = [_overlay(logged, name, Topic(name, "", name)) for name in rest]
    return list(groups.items())


def _plot(chart: Chart) -> _Plot:
    """A chart of a single run."""
    band = None if chart.band is None else chart.topic.band
    return _Plot(tuple(_Curve(0, name) for name in chart.series), band)


def _overlay(logged: Sequence[Mapping[str, Series]], name: str, topic: Topic) -> tuple[Chart, _Plot]:
    """A chart of one metric with a curve for each run, also for those that have none, so that colors stay the same."""
    title = topic.title if topic.metrics == name else f"{topic.title}: {name}"
    series = {f"{place} {name}": one.get(name, _NOTHING) for place, one in enumerate(logged)}
    curves = tuple(_Curve(place, name) for place in range(len(logged)))
    # What is said of a band is not true of several curves.
    explanation = name if topic.band or not topic.explanation else topic.explanation
    return Chart(replace(topic, title=title, explanation=explanation), series), _Plot(curves, None)


def _only(series: Mapping[str, Series]) -> RunFiles:
    """A run of which nothing but its metrics is known."""
    nothing = Samples((), 0, (), 0)
    return RunFiles(Path(), "", {}, JudgeView(), {}, "", series, (), None, None, nothing, nothing, (), (), ())
