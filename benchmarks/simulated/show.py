"""Prints a sweep in a terminal."""

from __future__ import annotations

from benchmarks.simulated.controllers import OURS
from benchmarks.simulated.sweep import AXES, Point, Sweep
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from leaderless.planner.memory.rank import format_bytes

TITLES = ("way", "step", "tokens/s", "a rank", "moving", "network", "process")


EXPLANATION = """
a rank: tokens per second of one rank; where ranks vary, also as a share of those in the first line
moving: seconds of all transitions of rows in a step
network: bytes through the busiest interface in the largest transition
process: main memory that rows take in the busiest process"""


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print what a step would take at every point, and what does not fit.

    Args:
        sweep: Simulated steps.
        console: Console to print to; lines are wrapped at its width.
    """
    head = Text.assemble((sweep.recipe, "bold"), f"  on {sweep.cluster.name}: a model, not a measurement\n")
    console.print(head, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for title in (AXES[sweep.axis], *TITLES):
        justify: JustifyMethod = "left" if title == "way" else "right"
        table.add_column(Text(title), justify=justify, overflow="fold", header_style="dim")
    for point in sweep.points:
        for way in sweep.ways:
            table.add_row(*_cells(sweep, point, way), end_section=way == sweep.ways[-1])
    console.print(table, highlight=False)
    console.print(Text(EXPLANATION, "dim"))
    _print_too_much(sweep, console)


def _cells(sweep: Sweep, point: Point, way: str) -> tuple[Text, ...]:
    estimate = point.estimates[way]
    share = f", {sweep.efficiency(point, way):.0%}" if sweep.axis == "world_size" else ""
    return (
        Text(f"{sweep.place(point):,}" if way == OURS else "", "bold"),
        Text(way),
        Text(f"{estimate.seconds:.1f} s"),
        Text(f"{estimate.tokens_per_s:,.0f}"),
        Text(f"{point.tokens_per_rank(way):,.0f}{share}"),
        Text(f"{estimate.transition_seconds:.2f} s"),
        Text(format_bytes(estimate.interface_bytes)),
        Text(format_bytes(estimate.process_bytes), "" if estimate.fits_host else "bold red"),
    )


def _print_too_much(sweep: Sweep, console: Console) -> None:
    """Print what does not fit into a device or a host; it is simulated nevertheless."""
    device, host = (f"{part.memory_gib:g} GiB" for part in (sweep.cluster.device, sweep.cluster.host))
    for point in sweep.points:
        place = f"{sweep.place(point):,} {AXES[sweep.axis]}"
        if not point.fits_device:
            needed = format_bytes(point.device_bytes)
            _warn(f"{place}: models and activations take {needed} of a device, which has {device}", console)
        for way, estimate in point.estimates.items():
            if not estimate.fits_host:
                _warn(
                    f"{place}: rows take {format_bytes(estimate.host_bytes)} of a host on the way "
                    f"'{way}', which has {host}",
                    console,
                )


def _warn(text: str, console: Console) -> None:
    console.print(Text(text, "yellow"), highlight=False)
