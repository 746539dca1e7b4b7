"""The output of a run in the terminal."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Self

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

from leaderless.observability.clock import seconds_left

console = Console(emoji=False)
"""Standard output, for requested results. Names such as `:key:` are not taken for emoji."""
errors = Console(stderr=True, emoji=False)
"""Standard error, for further notices."""

HEADLINES = (
    ("evaluation/mean@", "accuracy", "{:.3f}"),
    ("reward/mean", "reward", "{:z.3f}"),
    ("policy/loss", "loss", "{:z.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("policy/kl", "kl", "{:z.4f}"),
    ("rollout/response_tokens", "length", "{:.1f}"),
    ("episode/turns", "turns", "{:.1f}"),
    ("tool/calls", "calls", "{:.1f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
)
"""Metrics shown during a run: the name (or what is before its number), a label and a format."""
EVALUATED, EVALUATION_S = "evaluation/", "time/evaluate"
"""Beginning of metrics of held-out prompts, and the metric with the seconds that an evaluation took."""
FAILED = "reward/failed_share"
"""Share of the responses of a step whose reward could not be computed."""
MAX_ERROR_CHARACTERS = 120
"""Longest error of a reward on the progress line."""
LINE_EVERY_S = 10.0
"""Shortest time between two lines where output does not go to a terminal."""
STATUS_EVERY_S = 30.0
"""Longest time without a line where there is no live one."""
RECENT_STEPS = 20
"""Number of steps from which the time left is estimated."""


def print_line(text: str) -> None:
    """Print any text for people, as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_path(label: str, path: Path) -> None:
    """Print a label and a path, on one line that can be copied."""
    console.print(f"{label}: [bold]{escape(str(path))}", highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value for programs to read."""
    console.out(json.dumps(value, indent=2), highlight=False)


class _OwnColumn(ProgressColumn):
    """Shows a text of the display, so that nothing in it is taken for markup."""

    def __init__(self, text: Callable[[], Text], table_column: Column) -> None:
        super().__init__(table_column)
        self._text = text

    def render(self, task: Task) -> Text:  # noqa: ARG002 - as all have it
        """The text."""
        return self._text()


class Display:
    """A live progress line; where output does not go to a terminal, a plain line from time to time.

    Only the rank with `is_shown` shows anything. Within the context, what is done now is said at least every
    `STATUS_EVERY_S` seconds unless a live line shows it: by a thread, so that nothing that takes long is silent.

    Attributes:
        status: Function that describes what is done now; an empty text is not shown.
    """

    def __init__(
        self, console: Console, *, is_shown: bool = True, status: Callable[[], str] = lambda: "starting"
    ) -> None:
        self.console, self.is_shown, self.status = console, is_shown, status
        self._progress: Progress | None = None
        self._begin = self._said_s = self._ended_s = time.monotonic()
        self._last_line = 0.0
        self._done = self._evaluate_every = 0
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._numbers, self._left = Text(), ""
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._evaluated = 0
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._say_status, name="status", daemon=True)
        if self.is_shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        if self.is_shown:
            self._thread.join()

    def _say_status(self) -> None:
        while not self._is_closed.wait(1.0):
            now = time.monotonic()
            is_due = self._progress is None and now - self._said_s >= STATUS_EVERY_S
            if is_due and (status := self.status()):
                self.say(f"{escape(status)}  {timedelta(seconds=round(now - self._begin))}")

    def say(self, text: str | Text) -> None:
        """Print a line of text, with rich markup in a string."""
        if self.is_shown:
            self._said_s = time.monotonic()
            self.console.print(text, highlight=False, soft_wrap=True)

    def reading(self, what: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Show how much of a dataset has been read before the first step; see `counting`."""
        return self.counting(f"reading {what}", "rows")

    @contextmanager
    def counting(self, doing: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        """Show how much of something that takes long is done: a bar, or a line now and then.

        The function that it yields takes the number of units that are done so far, and the number of all.
        """
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        is_live = self.is_shown and self.console.is_terminal
        last_line = time.monotonic()
        with Progress(*columns, console=self.console, transient=True, disable=not is_live) as progress:
            task = progress.add_task(escape(doing), total=None, visible=False)

            def report(done: int, total: int) -> None:
                nonlocal last_line
                progress.update(task, completed=done, total=total, visible=True)
                if self.is_shown and not is_live and time.monotonic() - last_line > LINE_EVERY_S:
                    last_line = time.monotonic()
                    self.say(f"{escape(doing)}: {done:,} of {total:,} {unit}")

            yield report

    def start(self, num_steps: int, done: int, evaluate_every: int = 0) -> None:
        """Begin to show the steps of a run, some of which an earlier start may have done.

        An evaluation comes after each `evaluate_every` steps, and after the last; never with 0.
        """
        self._begin, self._done, self._evaluate_every = time.monotonic(), done, evaluate_every
        if not self.is_shown or not self.console.is_terminal:
            return
        # In a narrow terminal the numbers are folded and the activity is cut; steps and times stay whole.
        whole = Column(no_wrap=True)
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(table_column=whole),
            BarColumn(bar_width=10, table_column=whole),
            TimeElapsedColumn(table_column=whole),
            _OwnColumn(lambda: Text(self._left), table_column=whole),
            _OwnColumn(lambda: self._numbers, table_column=Column()),
            _OwnColumn(lambda: Text(self.status(), "dim"), table_column=Column(no_wrap=True, max_width=48)),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=done)
        self._progress.start()

    def step(self, step: int, num_steps: int, numbers: Mapping[str, float], reward_error: str = "") -> None:
        """Show the metrics of a finished step.

        The first error of a reward in this run is shown next to the share of failed rewards.
        """
        self.note(numbers)
        if any(name.startswith(EVALUATED) for name in numbers):
            self._evaluated = step
        headlines = (
            f"{label} {layout.format(self._latest[name])}"
            + (f" (step {self._evaluated})" if name.startswith(EVALUATED) else "")
            for name, label, layout in self._headlines()
        )
        text = Text("  ".join(headlines), "cyan" if self._progress is not None else "")
        if numbers.get(FAILED):
            error = f", first {reward_error[:MAX_ERROR_CHARACTERS]}" if reward_error else ""
            text.append(f"  rewards failed {numbers[FAILED]:.0%}{error}", "red")
        now = time.monotonic()
        if step > self._done + 1:  # the first step of a start compiles and warms up
            self._recent_s.append(now - self._ended_s - numbers.get(EVALUATION_S, 0.0))
        self._numbers, self._ended_s = text, now
        if self._recent_s:
            evaluation_s = self._latest.get(EVALUATION_S, 0.0)
            left = seconds_left(mean(self._recent_s), step, num_steps, self._evaluate_every, evaluation_s)
            self._left = f"left {timedelta(seconds=round(left))}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        elif now - self._last_line > LINE_EVERY_S or step == num_steps:
            self._last_line = now
            times = f"{timedelta(seconds=round(now - self._begin))} {self._left}".rstrip()
            self.say(Text(f"step {step}/{num_steps}  {times}  ").append_text(text))

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
