"""The charts of one run, or of several laid over one another, and what is new on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from leaderless.observability.report.catalogue import CATALOGUE, MAX_OWN_CHARTS, Chart, Topic, charts_of
from leaderless.observability.report.curves import Series
from leaderless.observability.report.run_files import Logged, RunFiles, flatten_recipe, read_run
from leaderless.observability.report.samples import Judge, Samples
from leaderless.observability.report.view import Card, curve_card, rounded
from leaderless.observability.seconds import PREFIX
from leaderless.ui.table import FullSeries, StepTable

SAMPLE_BUDGETS = 1_500_000, 400_000
"""Largest sizes of the samples of training and of held-out prompts on a live page, in bytes."""
MAX_ADDED = 2000
"""Number of points that are added to a chart before all of its points are chosen anew."""

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


class Board:
    """Charts of some runs, as one reader has them; `news` says what to add.

    Attributes:
        groups: Charts under headings, as they are now.
    """

    def __init__(self, tables: Mapping[str, StepTable]) -> None:
        """Draw what the tables hold.

        Args:
            tables: Numbers of each run, by its name.
        """
        self._names, self._tables = list(tables), list(tables.values())
        self._draw()

    def _draw(self) -> None:
        self._rows = [len(table) for table in self._tables]
        self._first_rows = list(self._rows)
        self._generations = [table.generation for table in self._tables]
        thinned = [{name: table.thinned(name) for name in table.names} for table in self._tables]
        found = _charts(thinned)
        self._plots: dict[str, _Plot] = {}
        self.groups: Groups = []
        for title, charts in found:
            cards = []
            for chart, plot in charts:
                identifier = f"chart-{len(self._plots)}"
                self._plots[identifier] = plot
                labels = [self._names[curve.place] for curve in plot.curves] if len(self._tables) > 1 else []
                cards.append(curve_card(identifier, chart, labels))
            self.groups.append((title, cards))
        self._known = [set(table.names) for table in self._tables]

    @property
    def data(self) -> dict[str, Data]:
        """What the page's script draws, by the identifier of the chart."""
        return {card.identifier: card.data for _, cards in self.groups for card in cards}

    @property
    def structure(self) -> list[tuple[str, object]]:
        """Which curves each chart has."""
        return [(identifier, plot) for identifier, plot in self._plots.items()]

    def news(self) -> tuple[dict[str, Data], bool]:
        """What is new since the last call, by chart, and whether the page has to be loaded again for other charts."""
        if any(set(table.names) != known for table, known in zip(self._tables, self._known, strict=True)):
            return {}, True
        has_dropped = [table.generation for table in self._tables] != self._generations
        added = max(len(table) - first for table, first in zip(self._tables, self._first_rows, strict=True))
        if has_dropped or added > MAX_ADDED:
            self._draw()
            return {identifier: {"data": data} for identifier, data in self.data.items()}, False
        found: dict[str, Data] = {}
        for identifier, plot in self._plots.items():
            added_points = [self._tables[c.place].since(c.metric, self._rows[c.place]) for c in plot.curves]
            if any(steps for steps, _ in added_points):
                traces = [{"steps": steps, "values": rounded(values)} for steps, values in added_points]
                found[identifier] = {"traces": traces, **self._band(plot)}
        self._rows = [len(table) for table in self._tables]
        return found, False

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


def read_live(table: StepTable, *, has_samples: bool = True) -> RunFiles:
    """All that the folder of a run holds, with the numbers that are in memory, and with or without samples."""
    times = [second for second in table.seconds if second == second]  # noqa: PLR0124 - NaN where there is none
    passed = sum(now - before if now >= before else now for before, now in pairwise([0.0, *times]))
    logged = Logged(FullSeries(table), tuple(table.steps), passed if times else None)
    return read_run(table.directory, logged, SAMPLE_BUDGETS if has_samples else None)


def differences(recipes: Sequence[str]) -> list[tuple[str, ...]]:
    """Settings that differ between recipes: the key, and its value in each; a dash where a recipe has none."""
    flat = [flatten_recipe(text) for text in recipes]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [(".".join(key), *(settings.get(key, "–") for settings in flat)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1 and row[0] != "name"]


def _charts(thinned: Sequence[Mapping[str, Series]]) -> list[tuple[str, list[tuple[Chart, _Plot]]]]:
    """Charts as in the report for a single run; for several, one for each metric, with a curve for each run."""
    if len(thinned) == 1:
        (series,) = thinned
        found, _ = charts_of(_only(series))
        return [
            (
                title,
                [
                    (
                        chart,
                        _Plot(
                            tuple(_Curve(0, name) for name in chart.series), chart.topic.band if chart.band else None
                        ),
                    )
                    for chart in charts
                ],
            )
            for title, charts in found
        ]
    names = dict.fromkeys(name for series in thinned for name in series)
    groups: list[tuple[str, list[tuple[Chart, _Plot]]]] = []
    drawn: set[str] = set()
    # A pattern such as `reward/*` takes the metrics that no other topic names.
    named = {name for topics in CATALOGUE.values() for topic in topics for name in (*topic.metrics, topic.band)}
    everything = _only(dict.fromkeys(names, Series((), ())))
    for title, topics in CATALOGUE.items():
        charts = []
        for topic in topics:
            for name in everything.matching(*topic.metrics):
                if name not in drawn and (name in topic.metrics or name not in named):
                    drawn.add(name)
                    charts.append(_overlay(thinned, name, topic))
        if charts:
            groups.append((title, charts))
    rest = [name for name in names if name not in drawn and not name.startswith(PREFIX)][:MAX_OWN_CHARTS]
    if rest:
        groups.append(("More metrics", [_overlay(thinned, name, Topic(name, "", (name,))) for name in rest]))
    return groups


def _overlay(thinned: Sequence[Mapping[str, Series]], name: str, topic: Topic) -> tuple[Chart, _Plot]:
    """A chart of one metric with a curve for each run, also for those that have none, so that colors stay the same."""
    title = topic.title if topic.metrics == (name,) else f"{topic.title}: {name}"
    series = {f"{place} {name}": one.get(name, Series((), ())) for place, one in enumerate(thinned)}
    curves = tuple(_Curve(place, name) for place in range(len(thinned)))
    # What is said of a band is not true of several curves.
    explanation = name if topic.band or not topic.explanation else topic.explanation
    return Chart(replace(topic, title=title, explanation=explanation), series), _Plot(curves, None)


def _only(series: Mapping[str, Series]) -> RunFiles:
    """A run of which nothing but its metrics is known."""
    nothing = Samples((), 0, (), 0)
    return RunFiles(Path(), "", {}, Judge(), {}, "", series, (), None, None, nothing, nothing, (), ())
