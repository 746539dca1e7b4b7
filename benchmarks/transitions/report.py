"""Tables and pictures of the results of `benchmarks/data_coordinator.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.transitions.case import Case, Kind, Way
from benchmarks.transitions.transition import Results, Transition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/scaling/hosts.json"
PICTURES = ROOT / "docs/images"
NAMES: dict[Way, str] = {
    "ours": "leaderless",
    "ray": "controller, Ray",
    "gloo": "controller, gloo",
    "packed": "controller, gloo, not padded",
}
COLORS: dict[Way, str] = {"ours": "C0", "ray": "C1", "gloo": "C2", "packed": "C3"}
KIND_NAMES: dict[Kind, str] = {"balance": "same ranks, uneven rows", "pools": "from pool to pool"}


class Axis(NamedTuple):
    """What grows from transition to transition while everything else stays the same.

    Attributes:
        name: File name of the picture.
        label: Label in the picture.
        value: Function that gives the value of a case.
        rest: Function that gives what must be the same along the axis.
        rest_label: Label of `rest`, with places for its two numbers.
    """

    name: str
    label: str
    value: Callable[[Case], int]
    rest: Callable[[Case], tuple[int, int]]
    rest_label: str

    def fixed(self, results: Results) -> tuple[int, int]:
        """The constant of the axis: the one with the most values."""
        values: dict[tuple[int, int], set[int]] = {}
        for run in results.transitions:
            values.setdefault(self.rest(run.case), set()).add(self.value(run.case))
        return max(values, key=lambda rest: len(values[rest]))

    def title(self, results: Results) -> str:
        """Description of what grows and what stays the same."""
        return f"By {self.label}, with {self.rest_label.format(*self.fixed(results))}:"

    def runs(self, results: Results, kind: Kind) -> dict[int, dict[Way, list[Transition]]]:
        """All transitions of a kind along the axis, by value and way, in the order of their repeats."""
        fixed = self.fixed(results)
        found: dict[int, dict[Way, list[Transition]]] = {}
        for run in sorted(results.transitions, key=lambda run: (self.value(run.case), run.repeat)):
            if run.case.kind == kind and self.rest(run.case) == fixed:
                found.setdefault(self.value(run.case), {}).setdefault(run.way, []).append(run)
        return found


AXES = (
    Axis(
        "hosts",
        "hosts",
        lambda case: case.hosts,
        lambda case: (case.prompts, case.max_tokens),
        "{:,} prompts and responses of up to {:,} tokens",
    ),
    Axis(
        "batch",
        "prompts",
        lambda case: case.prompts,
        lambda case: (case.hosts, case.max_tokens),
        "{} hosts and responses of up to {:,} tokens",
    ),
    Axis(
        "context",
        "longest response",
        lambda case: case.max_tokens,
        lambda case: (case.hosts, case.prompts),
        "{} hosts and {:,} prompts",
    ),
)


class Quantity(NamedTuple):
    """One measured quantity.

    Attributes:
        label: Label in tables and pictures, with the unit.
        value: Function that gives the value of a transition.
    """

    label: str
    value: Callable[[Transition], float]


QUANTITIES = (
    Quantity("seconds", lambda transition: transition.seconds),
    Quantity("busiest interface, MB", lambda transition: transition.busiest_bytes / 1e6),
    Quantity("busiest process, MB", lambda transition: transition.peak_bytes / 1e6),
)


def load(path: Path = RESULTS) -> Results | None:
    """The results of a benchmark; None if it has not been run."""
    return Results.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None


def save(results: Results, path: Path) -> None:
    """Write a line for each transition, so that two measurements can be compared line by line."""
    head = json.dumps(results.model_dump(exclude={"transitions"}))
    lines = ",\n".join(transition.model_dump_json(exclude={"shares"}) for transition in results.transitions)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-1]}, "transitions": [\n{lines}\n]}}\n', encoding="utf-8")


def tables(results: Results) -> str:
    """The conditions of the measurement, and a table for each axis, in Markdown.

    Args:
        results: Results that include those of `ours`.
    """
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    repeats = len({t.repeat for t in results.transitions})
    conditions = (
        f"{results.mbit_per_s:g} Mbit/s to and from each host, {results.cores} cores for all hosts together, "
        f"{versions}; median of {repeats}, in brackets least and most."
    )
    parts = [conditions]
    for axis in AXES:
        parts += [axis.title(results), axis_table(results, axis)]
    return "\n\n".join([*parts, "Evenness of the consumers' work, and cores in use:", ways_table(results)])


def axis_table(results: Results, axis: Axis) -> str:
    """Ours in full, and the controllers as multiples of ours in the same repeat."""
    ways = _ways(results)
    rows = []
    for kind, name in KIND_NAMES.items():
        for value, runs in axis.runs(results, kind).items():
            for quantity in QUANTITIES:
                ours = [quantity.value(run) for run in runs["ours"]]
                cells = [name, f"{value:,}", quantity.label, _spread(ours)]
                for way in ways[1:]:
                    theirs = [quantity.value(run) for run in runs[way]]
                    cells.append(_spread([their / our for their, our in zip(theirs, ours, strict=True)]))
                rows.append(cells)
    return _markdown(["transition", axis.label, "", *(NAMES[way] for way in ways)], rows)


def ways_table(results: Results) -> str:
    """Balance and cores of each way, over all transitions."""
    rows = []
    for way in _ways(results):
        runs = [run for run in results.transitions if run.way == way]
        rows.append([NAMES[way], _spread([run.balance for run in runs], 3), _spread([run.busy_cores for run in runs])])
    return _markdown(["way", "work of the fullest consumer, in that of the mean", "cores in use"], rows)


def draw(results: Results, folder: Path) -> None:
    """A picture for each axis: a row of charts for each kind of transition, a chart for each quantity."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for axis in AXES:
        sizes = {"figsize": (9.6, 5.4), "sharex": True, "squeeze": False, "layout": "constrained"}
        figure, charts = plt.subplots(len(KIND_NAMES), len(QUANTITIES), **sizes)
        for (kind, name), row in zip(KIND_NAMES.items(), charts, strict=True):
            for quantity, chart in zip(QUANTITIES, row, strict=True):
                _draw_chart(chart, axis.runs(results, kind), quantity)
            row[0].set_ylabel(name, fontsize=9)
        for quantity, chart in zip(QUANTITIES, charts[0], strict=True):
            chart.set_title(quantity.label, fontsize=9)
        figure.legend(*charts[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
        figure.supxlabel(axis.label, fontsize=9)
        figure.savefig(folder / f"scaling-{axis.name}.png", dpi=100)
        plt.close(figure)


def _draw_chart(chart: Axes, runs: Mapping[int, Mapping[Way, Sequence[Transition]]], quantity: Quantity) -> None:
    """A line of medians for each way, and a band from the smallest to the largest value."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    places = list(runs)
    for way in (way for way in NAMES if any(way in some for some in runs.values())):
        values = [[quantity.value(run) for run in some[way]] for some in runs.values()]
        least, most = [*map(min, values)], [*map(max, values)]
        chart.fill_between(places, least, most, color=COLORS[way], alpha=0.25, linewidth=0)
        chart.plot(places, [*map(median, values)], "o-", color=COLORS[way], label=NAMES[way], markersize=4)
    chart.set_xscale("log", base=2)
    chart.set_yscale("log")
    chart.set_xticks(places, [f"{value:,}" for value in places])
    chart.minorticks_off()
    chart.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    chart.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    chart.grid(visible=True, color="0.9")
    chart.tick_params(labelsize=8)


def _ways(results: Results) -> list[Way]:
    measured = {run.way for run in results.transitions}
    return [way for way in NAMES if way in measured]


def _spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, with the smallest and the largest value if they differ from it as shown."""
    shown = [
        f"{value:.{digits}f}" if value < 10 else f"{value:,.0f}" for value in (median(values), min(values), max(values))
    ]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
