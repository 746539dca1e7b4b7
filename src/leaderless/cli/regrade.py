"""`leaderless env regrade`: grades the episodes of a run again, as after a reward was mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from leaderless.cli.env import EpisodesOf, OfNumber, OfStep, Overrides, chosen_steps
from leaderless.cli.options import cut
from leaderless.config import RecipeError
from leaderless.observability.console import console, print_line

if TYPE_CHECKING:
    from leaderless.run.episodes import Comparison

MAX_CHANGES = 10
"""Number of changes that are listed."""
MAX_CELL_CHARACTERS = 60
"""Length at which a response is cut in the table."""


def regrade_episodes(
    target: EpisodesOf,
    overrides: Overrides = None,
    step: OfStep = None,
    episode: OfNumber = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="Other rewards than the run's: a recipe whose `reward` section is used, or a setting as "
            "math.weight=0.5. May be given several times."
        ),
    ] = None,
) -> None:
    """Grade the episodes of a run again with the rewards as they are now, and compare with their grades in the run.

    New grades are written next to the journal, as regraded-1.jsonl.gz in the folder of each step; the run's stay. Ends
    with exit code 1 if a reward still fails.
    """
    from leaderless.run.episodes import RunEpisodes  # imports torch

    episodes, report = RunEpisodes.of(target, overrides or []), _Report()
    try:
        for number, graded in episodes.regrade(chosen_steps(episodes, "step", step, target), reward or []):
            chosen = [one for one in graded if episode in {None, one.part.number}]
            if chosen:
                report.add(number, chosen)
                report.files.append(episodes.write_regraded(number, chosen, has_all=episode is None))
    except ValueError as error:
        raise RecipeError.at("", str(error)) from error
    if not report.files:
        raise RecipeError.at("", f"there is no episode {episode} in the chosen steps of {target}")
    report.print()
    if report.first_error:
        raise typer.Exit(1)


@dataclass
class _Report:
    """What has changed; greedy episodes, which are only baselines, are written, but in no table.

    Attributes:
        files: Files of the new grades.
        first_error: The first error of a reward; empty if none has failed.
    """

    files: list[Path] = field(default_factory=list)
    first_error: str = ""
    _rows: list[tuple[int, Sequence[Comparison]]] = field(default_factory=list)

    def add(self, step: int, graded: Sequence[Comparison]) -> None:
        """Add the episodes of a step."""
        self._rows.append((step, [one for one in graded if one.part.is_sampled]))
        self.first_error = self.first_error or next((one.new.first_error for one in graded if one.new.is_broken), "")

    def print(self) -> None:
        """Print the numbers of each step, what has changed, and where the grades are."""
        titles = ("step", "episodes", "absent", "failed before → now", "changed", "mean before → now")
        table = Table(*(Column(title, justify="right", no_wrap="mean" in title) for title in titles))
        for step, graded in self._rows:
            table.add_row(str(step), *_cells(graded))
        everything = [one for _, graded in self._rows for one in graded]
        if len(self._rows) > 1:
            table.add_section()
            table.add_row("all", *_cells(everything))
        console.print(table)
        self._print_changes()
        if self.first_error:
            count = sum(one.new.is_broken for one in everything)
            print_line(f"\n{count:,} episodes cannot be graded yet; the first error: {self.first_error}")
        more = f" and {len(self.files) - 1:,} more" if len(self.files) > 1 else ""
        print_line(f"\nthe new grades are in {self.files[0]}{more}")

    def _print_changes(self) -> None:
        changed = [(step, one) for step, graded in self._rows for one in graded if one.is_changed]
        if not changed:
            print_line("\nno reward has changed")
            return
        shown = nlargest(MAX_CHANGES, changed, key=lambda pair: abs((pair[1].now or 0.0) - (pair[1].before or 0.0)))
        which = f"the largest {len(shown)} of {len(changed):,}" if len(shown) < len(changed) else f"all {len(shown)}"
        print_line(f"\nrewards that have changed ({which}):")
        table = Table(*(Column(title, justify="right") for title in ("step", "episode", "before", "now")), "said last")
        for step, one in shown:
            said = cut("" if one.part.asked is None else one.part.asked.response, MAX_CELL_CHARACTERS)
            table.add_row(str(step), str(one.part.number), _value(one.before), _value(one.now), Text(said))
        console.print(table)


def _cells(graded: Sequence[Comparison]) -> list[str]:
    """The numbers of some episodes; absent ones failed while they were played, and have nothing to grade."""
    whole = [one for one in graded if one.part.failure is None]
    known = [one for one in whole if one.old is not None]
    before = [one.before for one in known if one.before is not None]
    failed = f"{len(known) - len(before):,}" if known else "–"
    return [
        f"{len(graded):,}",
        f"{len(graded) - len(whole):,}",
        f"{failed} → {sum(one.new.is_broken for one in whole):,}",
        f"{sum(one.is_changed for one in graded):,}",
        f"{_mean(before)} → {_mean([one.now for one in whole if one.now is not None])}",
    ]


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f}" if values else "–"


def _value(value: float | None) -> str:
    return "failed" if value is None else f"{value:.4g}"
