"""The charts of a sweep, and the picture and page that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulated.controllers import OURS
from benchmarks.simulated.sweep import AXES, Sweep

from leaderless.observability.run_directory import write_atomically
from leaderless.planner.simulate.cluster import GIB
from leaderless.planner.simulate.step import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIGA = 1e9
COLORS = ("#2563eb", "#c2410c", "#7c3aed", "#0f8a5f", "#be185d", "#6b7a10")
"""Colors of the data paths, the project's own first."""
LIMIT_COLOR = "#57606a"


@dataclass(frozen=True)
class Line:
    """Values of one data path, or a limit.

    Attributes:
        name: Name in the legend.
        color: Color, as `#rrggbb`.
        values: Value of each point; None where there is nothing to show.
        is_limit: Whether it is drawn dashed.
    """

    name: str
    color: str
    values: tuple[float | None, ...]
    is_limit: bool = False


@dataclass(frozen=True)
class Chart:
    """One quantity against what varies.

    Attributes:
        title: Quantity and its unit.
        lines: Lines of all data paths.
        is_logarithmic: Whether values are on a logarithmic scale; what varies always is.
    """

    title: str
    lines: tuple[Line, ...]
    is_logarithmic: bool = True


def charts_of(sweep: Sweep) -> tuple[Chart, ...]:
    """Throughput, efficiency where ranks vary, gain over controllers, seconds, bytes and memory of transitions.

    Args:
        sweep: Simulated steps.
    """
    is_scaled = sweep.axis == "world_size"
    throughput = (*_lines(sweep, lambda e: e.tokens_per_s), *_linear(sweep))
    memory = (*_lines(sweep, lambda e: e.process_bytes / GIGA), _host_memory(sweep))
    return (
        Chart("tokens per second", throughput, is_logarithmic=is_scaled),
        *((_efficiency(sweep),) if is_scaled else ()),
        _gain(sweep),
        Chart("seconds of all transitions in a step", _lines(sweep, lambda e: e.transition_seconds)),
        Chart("GB through the busiest interface, per transition", _lines(sweep, lambda e: e.interface_bytes / GIGA)),
        Chart("GB of rows in the busiest process", memory),
    )


def label(way: str) -> str:
    """The title of a data path.

    Args:
        way: Its name.
    """
    return way if way == OURS else f"single controller ({way})"


def _lines(sweep: Sweep, measure: Callable[[Estimate], float]) -> tuple[Line, ...]:
    return tuple(
        Line(label(way), color, tuple(measure(point.estimates[way]) or None for point in sweep.points))
        for way, color in _colored(sweep)
    )


def _colored(sweep: Sweep) -> Iterator[tuple[str, str]]:
    for number, way in enumerate(sweep.ways):
        yield way, COLORS[number % len(COLORS)]


def _linear(sweep: Sweep) -> tuple[Line, ...]:
    """The throughput of the first point, extrapolated to more ranks."""
    if sweep.axis != "world_size":
        return ()
    per_rank = sweep.points[0].tokens_per_rank(OURS)
    return (Line("linear", LIMIT_COLOR, tuple(per_rank * p.world_size for p in sweep.points), is_limit=True),)


def _efficiency(sweep: Sweep) -> Chart:
    lines = tuple(
        Line(label(way), color, tuple(sweep.efficiency(point, way) for point in sweep.points))
        for way, color in _colored(sweep)
    )
    first = sweep.points[0].world_size
    return Chart(f"tokens per second and rank, as a share of those on {first}", lines, is_logarithmic=False)


def _gain(sweep: Sweep) -> Chart:
    lines = tuple(
        Line(label(way), color, tuple(point.gain(way) for point in sweep.points))
        for way, color in _colored(sweep)
        if way != OURS
    )
    return Chart("throughput of ours, as a multiple of the controller's", lines, is_logarithmic=False)


def _host_memory(sweep: Sweep) -> Line:
    limit = sweep.cluster.host.memory_gib * GIB / GIGA
    return Line("memory of a host", LIMIT_COLOR, (limit,) * len(sweep.points), is_limit=True)


def draw_png(sweep: Sweep, path: Path) -> None:
    """Draw the charts as a picture.

    Args:
        sweep: Simulated steps.
        path: The file.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes, charts = figure.subplots(2, 3), charts_of(sweep)
    for axis, chart in zip(axes.flat, charts, strict=False):
        _draw(axis, chart, sweep)
    for axis in axes.flat[len(charts) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=7)
    axes.flat[len(charts) - 1].legend(fontsize=7)
    figure.suptitle(f"{sweep.recipe}, {sweep.cluster.name}: a model, not a measurement", fontsize=9)
    figure.savefig(path, dpi=110)


def _draw(axis: Axes, chart: Chart, sweep: Sweep) -> None:
    places = [sweep.place(point) for point in sweep.points]
    for line in chart.lines:
        values = [float("nan") if value is None else value for value in line.values]
        style = "--" if line.is_limit else "-o"
        axis.plot(places, values, style, color=line.color, label=line.name, linewidth=1.2, markersize=3)
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [f"{place:,}" for place in places])
    axis.minorticks_off()
    there = [value for line in chart.lines for value in line.values if value is not None]
    if chart.is_logarithmic and there:
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.1 * max(there, default=1.0))
    axis.set_title(chart.title, fontsize=9)
    axis.set_xlabel(AXES[sweep.axis], fontsize=8)
    axis.tick_params(labelsize=7, axis="y")
    axis.tick_params(labelsize=7, axis="x", rotation=40)
    axis.grid(visible=True, color="0.9", linewidth=0.6)


def write_page(sweep: Sweep, path: Path) -> None:
    """Write the charts as an interactive page, which loads nothing from elsewhere.

    Args:
        sweep: Simulated steps.
        path: The file.
    """
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    charts = charts_of(sweep)
    figure = make_subplots(2, 3, subplot_titles=[chart.title for chart in charts])
    places = [sweep.place(point) for point in sweep.points]
    for number, chart in enumerate(charts):
        row, column = divmod(number, 3)
        for line in chart.lines:
            dash = "dash" if line.is_limit else "solid"
            trace = graph_objects.Scatter(
                x=places,
                y=list(line.values),
                name=line.name,
                mode="lines" if line.is_limit else "lines+markers",
                line={"color": line.color, "dash": dash},
                legendgroup=line.name,
                showlegend=line.name not in {x.name for x in figure.data},
            )
            figure.add_trace(trace, row + 1, column + 1)
        figure.update_xaxes(type="log", title=AXES[sweep.axis], row=row + 1, col=column + 1)
        kind = "log" if chart.is_logarithmic else "linear"
        figure.update_yaxes(type=kind, rangemode="tozero", row=row + 1, col=column + 1)
    title = f"{sweep.recipe}, {sweep.cluster.name}: a model, not a measurement"
    figure.update_layout(title=title, template="plotly_white", height=900)
    write_atomically(path, figure.to_html(include_plotlyjs=True))
