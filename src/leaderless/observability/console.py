"""The output of a run in the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

console = Console(emoji=False)
"""Standard output, for requested results. Names such as `:key:` are not taken for emoji."""
errors = Console(stderr=True, emoji=False)
"""Standard error, for further notices."""

HEADLINES = (
    ("evaluation/mean@", "accuracy", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("policy/loss", "loss", "{:.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("policy/kl", "kl", "{:.4f}"),
    ("rollout/response_tokens", "length", "{:.1f}"),
    ("episode/turns", "turns", "{:.1f}"),
    ("tool/calls", "calls", "{:.1f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
)
"""Metrics shown during a run: the name (or what is before its number), a label and a format."""
FAILED = "reward/failed_share"
"""Share of the responses of a step whose reward could not be computed."""
MAX_ERROR_CHARACTERS = 120
"""Longest error of a reward on the progress line."""
LINE_EVERY_S = 10.0
"""Shortest time between two lines where output does not go to a terminal."""


def print_line(text: str) -> None:
    """Print any text for people, as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_path(label: str, path: Path) -> None:
    """Print a label and a path, on one line that can be copied."""
    console.print(f"{label}: [bold]{escape(str(path))}", highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value for programs to read."""
    console.out(json.dumps(value, indent=2), highlight=False)


class _FieldColumn(ProgressColumn):
    """Shows a `Text` from a field of the task, so that nothing in it is taken for markup."""

    def __init__(self, name: str, table_column: Column) -> None:
        super().__init__(table_column)
        self._name = name

    def render(self, task: Task) -> Text:
        """The field."""
        text: Text = task.fields[self._name]
        return text


class Display:
    """A live progress line; where output does not go to a terminal, a plain line from time to time.

    Only the rank with `is_shown` shows anything.
    """

    def __init__(self, console: Console, *, is_shown: bool) -> None:
        self.console, self.is_shown = console, is_shown
        self._progress: Progress | None = None
        self._last_line = self._begin = 0.0
        self._done = 0
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print a line of text with rich markup."""
        if self.is_shown:
            self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def reading(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show how much of a dataset has been read before the first step: a bar, or a line now and then.

        The function that it yields takes the number of rows read so far, and the number of all rows.
        """
        columns = TextColumn("reading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        is_live = self.is_shown and self.console.is_terminal
        last_line = time.monotonic()
        with Progress(*columns, console=self.console, transient=True, disable=not is_live) as progress:
            task = progress.add_task(escape(what), total=None, visible=False)

            def report(done: int, total: int) -> None:
                nonlocal last_line
                progress.update(task, completed=done, total=total, visible=True)
                if self.is_shown and not is_live and time.monotonic() - last_line > LINE_EVERY_S:
                    last_line = time.monotonic()
                    self.say(f"reading {escape(what)}: {done:,} of {total:,} rows")

            yield report

    def start(self, num_steps: int, done: int) -> None:
        """Begin to show the steps of a run, some of which an earlier start may have done."""
        self._begin, self._done = time.monotonic(), done
        if not self.is_shown or not self.console.is_terminal:
            return
        # In a narrow terminal the numbers are folded and the activity is cut; steps and times stay whole.
        whole = Column(no_wrap=True)
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(table_column=whole),
            BarColumn(bar_width=10, table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TextColumn("left"),
            TimeRemainingColumn(table_column=whole),
            _FieldColumn("numbers", table_column=Column()),
            _FieldColumn("activity", table_column=Column(no_wrap=True, max_width=32)),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=done, numbers=Text(), activity=Text())
        self._progress.start()

    def activity(self, name: str, fraction: float | None = None) -> None:
        """Show which node is running, and the fraction of its work that is done, from 0 to 1."""
        if self._progress is not None:
            share = "" if fraction is None else f" {fraction:.0%}"
            self._progress.update(self._task, activity=Text(f"{name}{share}", "dim"))

    def step(self, step: int, num_steps: int, numbers: Mapping[str, float], reward_error: str = "") -> None:
        """Show the metrics of a finished step.

        The first error of a reward in this run is shown next to the share of failed rewards.
        """
        self.note(numbers)
        headlines = (f"{label} {layout.format(self._latest[name])}" for name, label, layout in self._headlines())
        text = Text("  ".join(headlines), "cyan" if self._progress is not None else "")
        if numbers.get(FAILED):
            error = f", first {reward_error[:MAX_ERROR_CHARACTERS]}" if reward_error else ""
            text.append(f"  rewards failed {numbers[FAILED]:.0%}{error}", "red")
        if self._progress is not None:
            self._progress.update(self._task, completed=step, numbers=text)
        elif self.is_shown and (time.monotonic() - self._last_line > LINE_EVERY_S or step == num_steps):
            self._last_line = time.monotonic()
            spent = self._last_line - self._begin
            left = spent / max(1, step - self._done) * (num_steps - step)
            times = f"{timedelta(seconds=round(spent))} left {timedelta(seconds=round(left))}"
            line = Text(f"step {step}/{num_steps}  {times}  ").append_text(text)
            self.console.print(line, highlight=False, soft_wrap=True)

    def note(self, numbers: Mapping[str, float]) -> None:
        """Remember metrics of a step for the summary, as other loops have logged them."""
        for name, value in numbers.items():
            self._first.setdefault(name, value)
            self._latest[name] = value

    def stop(self) -> None:
        """End the live line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, title: str) -> None:
        """Print a table of the first and last values of the metrics."""
        if not self.is_shown or not self._latest:
            return
        table = Table(title=title, title_justify="left")
        table.add_column("metric")
        for column in ("first", "last"):
            table.add_column(column, justify="right")
        for name, label, layout in self._headlines():
            table.add_row(f"{label} [dim]({name})", layout.format(self._first[name]), layout.format(self._latest[name]))
        self.console.print(table)

    def _headlines(self) -> list[tuple[str, str, str]]:
        """The reported headline metrics: name, label and format."""
        return [
            (name, label, layout)
            for beginning, label, layout in HEADLINES
            for name in self._latest
            if name == beginning or (beginning.endswith("@") and name.startswith(beginning))
        ]
