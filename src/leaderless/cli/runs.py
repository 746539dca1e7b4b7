"""Commands about several runs: `leaderless ls` and `compare`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column, Table

from leaderless.cli.options import JsonOption, check_run
from leaderless.config import RecipeError
from leaderless.observability.console import HEADLINES, console, print_json, print_line
from leaderless.observability.report.unchecked_values import as_number
from leaderless.observability.run_directory import RunDirectory

WIDE = 200
"""Width of tables where output does not go to a terminal."""


def ls(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold some; by default `runs`.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Further metric or setting to show. May be given several times.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, the one that changed last first: state, step, time left, accuracy, reward and tags."""
    from leaderless.serving.live_page.pages import RunStore

    roots = [folder.resolve() for folder in folders or [Path("runs")]]
    for root in roots:
        if not root.is_dir():
            raise RecipeError.at("", f"{root} is no folder: name the folder of a run, or one that holds runs")
    runs = RunStore(roots).list(column or ())
    if as_json:
        print_json(runs)
        return
    rows = [_cells(run, column or ()) for run in runs]
    titles = ("run", "state", "step", "left", "accuracy", "reward", *(column or ()), "tags", "changed")
    known = [place for place, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    table = Table(box=None, pad_edge=False)
    for place in known:
        is_text, is_own = titles[place] in {"run", "tags"}, titles[place] in (column or ())
        width = min(20, max(len(row[place]) for row in rows)) if is_text else None
        side: Literal["left", "right"] = "left" if is_text else "right"
        no_wrap = not is_text and not is_own
        table.add_column(titles[place], min_width=width, overflow="fold", no_wrap=no_wrap, justify=side)
    for row in rows:
        table.add_row(*(row[place] for place in known))
    console.print(table, width=None if console.is_terminal else WIDE)
    if not runs:
        print_line(f"there is no run in {', '.join(map(str, roots))}")


def _cells(run: Mapping[str, object], columns: Sequence[str]) -> list[str]:
    """A run as texts; empty for what is not known."""
    from leaderless.observability.report.view import format_duration

    left, accuracy, changed = (as_number(run[name]) for name in ("left_s", "accuracy", "changed"))
    return [
        str(run["key"]),
        str(run["state"]),
        "" if run["step"] is None else f"{run['step']}/{run['num_steps'] or '?'}",
        "" if left is None else format_duration(round(left)),
        "" if accuracy is None else f"{accuracy:.3f} (step {run['accuracy_step']})",
        *(_shown(run[name]) for name in ("reward", *(f"column {name}" for name in columns))),
        " ".join(run["tags"]) if isinstance(run["tags"], tuple) else "",
        f"{format_duration(round(time.time() - changed))}" if changed else "",
    ]


def _shown(value: object) -> str:
    return f"{value:z.4g}" if isinstance(value, float | int) else "" if value is None else str(value)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="The folders of two or more runs.")],
    as_json: JsonOption = False,
) -> None:
    """Show in which settings runs differ, and their newest numbers, side by side."""
    from leaderless.serving.live_page.charts import differences

    for run in runs:
        check_run(run)
    names = [str(run) for run in runs] if len({run.name for run in runs}) < len(runs) else [run.name for run in runs]
    settings = differences([(run / "config.yaml").read_text(encoding="utf-8") for run in runs])
    numbers = _newest(runs)
    if as_json:
        rows = [(kind, row) for kind, some in (("settings", settings), ("numbers", numbers)) for row in some]
        print_json([{"kind": kind, "name": row[0], **dict(zip(names, row[1:], strict=True))} for kind, row in rows])
        return
    for title, some in (("setting", settings), ("newest number", numbers)):
        columns = [Column(title, overflow="fold"), *(Column(one, justify="right", overflow="fold") for one in names)]
        table = Table(*columns, box=None, pad_edge=False)
        for row in some:
            table.add_row(*row)
        if some:
            console.print(table, "", width=None if console.is_terminal else WIDE)
        else:
            print_line(f"no {title} differs" if title == "setting" else "no number was logged")


def _newest(runs: Sequence[Path]) -> list[tuple[str, ...]]:
    """Headline metrics of runs, each with the step of its newest value."""
    found: list[dict[str, tuple[float, int]]] = []
    for run in runs:
        newest: dict[str, tuple[float, int]] = {}
        for row in RunDirectory(run).read_metrics():
            step = int(row["step"])
            newest |= {"step": (step, step)} | {
                name: (value, step) for name, value in row.items() if not math.isnan(value)
            }
        found.append(newest)
    rows = [("step", *(_value(newest, "step", "{:.0f}") for newest in found))]
    for beginning, label, layout in HEADLINES:
        known = dict.fromkeys(name for newest in found for name in newest if name.startswith(beginning))
        names = [name for name in known if name == beginning or beginning.endswith("@")]
        rows += [(f"{label} ({name})", *(_value(newest, name, layout) for newest in found)) for name in names]
    return rows


def _value(newest: Mapping[str, tuple[float, int]], name: str, layout: str) -> str:
    """A number, and its step where that is not the last one."""
    if name not in newest:
        return "–"
    value, step = newest[name]
    return layout.format(value) + (f" (step {step})" if step < newest["step"][1] else "")
