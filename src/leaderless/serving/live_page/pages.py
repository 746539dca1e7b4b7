"""Runs as the server knows them: their numbers in memory, and the pages about them. Every method may be slow."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from threading import Lock, RLock

from leaderless.config.load import all_keys
from leaderless.observability.report.curves import MAX_POINTS
from leaderless.observability.report.page import environment, json_of, outcome_values, render, report_values
from leaderless.observability.report.run_files import flatten_recipe
from leaderless.serving.live_page.charts import Board, differences, read_live
from leaderless.serving.live_page.metric_table import StepTable
from leaderless.serving.live_page.run_list import EventList, RunIndex, RunLine, doing, now_values, read_text

MAX_TABLES = 24
"""Number of runs whose numbers are kept in memory; those that were not looked at for longest are dropped."""
MAX_RUNS = 16
"""Number of runs that can be laid over one another."""
OUTCOME_EVERY_S = 5.0
"""Shortest time between two sums of a run on a page."""
OUTCOME_SHARE = 0.02
"""Largest share of its time that a page of a long run spends on these sums."""
SAMPLES_EVERY_S = 10.0
"""Shortest time between two looks at new samples for a page."""


class UnknownRunError(Exception):
    """There is no such run."""


class Watched:
    """The numbers of a run, which one thread uses at a time."""

    def __init__(self, path: Path) -> None:
        self.lock, self.table, self.events = RLock(), StepTable(path), EventList(path)


class RunStore:
    """Finds runs, and makes the pages about them."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self._index, self._lock = RunIndex(roots), Lock()
        self._watched: dict[Path, Watched] = {}
        self._settings: dict[Path, tuple[int, Mapping[str, str]]] = {}

    def path(self, key: str) -> Path:
        """The folder of a run; only runs of the list have one, whatever the key looks like."""
        with self._lock:
            found = self._index.paths().get(key)
        if found is None:
            raise UnknownRunError(key)
        return found

    def line(self, key: str) -> RunLine:
        """Entry of a run in the list."""
        path = self.path(key)
        with self._lock:
            return self._index.line(key, path)

    def list(self, columns: Sequence[str] = ()) -> list[dict[str, object]]:
        """All runs, for the page that lists them, with further columns: metrics of the last step, or settings."""
        with self._lock:
            lines = self._index.lines()
        shown = {"reward": "reward/mean", "loss": "policy/loss", "step_s": "time/step"}
        return [
            {name: getattr(line, name) for name in ("key", "state", "step", "num_steps", "tags", "left_s")}
            | {"changed": line.changed_s}
            | dict(zip(("accuracy", "accuracy_step"), line.accuracy or (None, None), strict=True))
            | {name: line.numbers.get(metric) for name, metric in shown.items()}
            | {f"column {name}": self._value(line, name) for name in columns}
            for line in lines
        ]

    def _value(self, line: RunLine, name: str) -> object:
        """A metric of the last step of a run, or a setting of its recipe."""
        if name in line.numbers:
            return line.numbers[name]
        recipe = line.path / "config.yaml"
        try:
            stamp = recipe.stat().st_mtime_ns
        except OSError:
            return None
        known = self._settings.get(recipe)
        if known is None or known[0] != stamp:
            known = stamp, {".".join(key): value for key, value in flatten_recipe(read_text(recipe)).items()}
            self._settings[recipe] = known
        return known[1].get(name)

    def watched(self, key: str) -> Watched:
        """The numbers of a run."""
        path = self.path(key)
        with self._lock:
            one = self._watched.pop(path, None) or Watched(path)
            self._watched[path] = one  # the one looked at last stands last
            while len(self._watched) > MAX_TABLES:
                self._watched.pop(next(iter(self._watched)))
        return one

    def index_page(self, columns: Sequence[str] = ()) -> str:
        """The page that lists all runs."""
        roots = ", ".join(str(root) for root in self.roots)
        with self._lock:
            lines = self._index.lines()
        known = sorted({name for line in lines for name in line.numbers} | set(all_keys()))
        data = json_of(self.list(columns))
        return render("live_index.html", roots=roots, run_data=data, columns=columns, known=known)

    def run_page(self, key: str) -> str:
        """The page about one run."""
        line, one = self.line(key), self.watched(key)
        with one.lock:
            one.table.read()
            board, run = Board({key: one.table}), read_live(one.table)
            thinned = f"Curves of more than {MAX_POINTS:,} points are thinned; the lowest and highest values are kept."
            values = report_values(run, board.groups(), [thinned] if len(one.table) > MAX_POINTS else [])
            now = now_values(line, one.events)
        picture, values["picture"] = values["picture"], ""
        return render(
            "live_run.html",
            **values,
            key=key,
            now=now,
            at=stamp(board, [one.table]),
            can_stop=line.state == "running",
            picture_now=picture,
        )

    def compare_page(self, keys: Sequence[str]) -> str:
        """The page that lays runs over one another."""
        watched = {key: self.watched(key) for key in keys}
        with ExitStack() as stack:
            hold(stack, list(watched.values()))
            for one in watched.values():
                one.table.read()
            tables = [one.table for one in watched.values()]
            board = Board({key: one.table for key, one in watched.items()})
            groups = board.groups()
        recipes = [read_text(self.path(key) / "config.yaml") for key in keys]
        return render(
            "live_compare.html",
            keys=list(keys),
            differences=differences(recipes),
            curves=groups,
            chart_data=json_of({card.identifier: card.data for _, cards in groups for card in cards}),
            at=stamp(board, tables),
        )

    def samples(self, key: str) -> str:
        """The samples of a run that its page shows, as JSON."""
        one = self.watched(key)
        with one.lock:
            one.table.read()
            run = read_live(one.table)
        kinds = {"sample-data": run.samples, "held-out-data": run.held_out}
        steps = {name: [asdict(step) for step in kind.steps] for name, kind in kinds.items()}
        return json.dumps(steps, allow_nan=False).encode("utf-8", "backslashreplace").decode("utf-8")

    def ask_to_stop(self, key: str) -> bool:
        """Ask a run to stop after its present step; returns whether it is running."""
        if self.line(key).state != "running":
            return False
        (self.path(key) / "stop").touch()
        return True


class RunReader:
    """One page that is open: what it shows, and what to send to it next."""

    def __init__(self, desk: RunStore, keys: Sequence[str], at: str) -> None:
        """Send nothing yet; `at` is the stamp of what the page showed when it was loaded."""
        self._desk, self._keys, self._at = desk, keys, at
        self._board: Board | None = None
        self._sent: dict[str, object] = {}
        self._samples_s = time.monotonic()
        self._outcome_due_s = self._samples_s + OUTCOME_EVERY_S
        self._num_samples = -1

    def news(self) -> Mapping[str, object]:
        """Changes since the last call; empty if there are none."""
        watched = [self._desk.watched(key) for key in self._keys]
        tables = [one.table for one in watched]
        with ExitStack() as stack:
            hold(stack, watched)
            for table in tables:
                table.read()
            charts: Mapping[str, object]
            if self._board is None:
                self._board = Board(dict(zip(self._keys, tables, strict=True)))
                here = stamp(self._board, tables)
                must_reload = self._at.rpartition("/")[0] != here.rpartition("/")[0]
                charts = self._board.everything() if self._at != here else {}
            else:
                charts, must_reload = self._board.news()
            if must_reload:
                return {"reload": True}
            news: dict[str, object] = {"charts": charts} if charts else {}
            if len(watched) == 1:
                news |= self._about_one(watched[0])
        return news

    def _about_one(self, one: Watched) -> dict[str, object]:
        line = self._desk.line(self._keys[0])
        values: dict[str, object] = {
            "now": environment().get_template("live_now.html").render(now=now_values(line, one.events)),
            "doing": doing(line.path),
            "can_stop": line.state == "running",
        }
        if time.monotonic() > self._outcome_due_s:
            began = time.monotonic()
            run = read_live(one.table, has_samples=False)
            values["outcome"] = environment().get_template("outcome.html").render(**outcome_values(run))
            took_s = time.monotonic() - began
            self._outcome_due_s = time.monotonic() + max(OUTCOME_EVERY_S, took_s / OUTCOME_SHARE)
        if time.monotonic() - self._samples_s > SAMPLES_EVERY_S:
            self._samples_s = time.monotonic()
            newest = _newest(line.path / "samples")
            if self._num_samples not in {-1, newest}:
                values["has_samples"] = True
            self._num_samples = newest
        changed = {name: value for name, value in values.items() if self._sent.get(name) != value}
        self._sent |= {name: value for name, value in changed.items() if name != "has_samples"}
        return changed


def hold(stack: ExitStack, watched: Sequence[Watched]) -> None:
    """Hold the locks of some runs, in an order that is the same for all readers."""
    for one in sorted({id(one): one for one in watched}.values(), key=id):
        stack.enter_context(one.lock)


def stamp(board: Board, tables: Sequence[StepTable]) -> str:
    """Mark of a page's contents: its charts, and the last rows that they have."""
    charts = zlib.crc32(json.dumps(board.structure).encode())
    return f"{charts}/{'-'.join(f'{len(table)}.{table.generation}' for table in tables)}"


def _newest(folder: Path) -> int:
    """A number that changes when samples are added."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
