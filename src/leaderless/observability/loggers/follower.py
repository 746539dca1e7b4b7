"""Gives a logger the output of a run, in order and once: its numbers, and tables of its samples and episodes."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from leaderless.observability.episode_files import read_episode_file
from leaderless.observability.line_file import FileLine, GrowingFile
from leaderless.observability.loggers.protocol import Cell, LoggedRun, LoggedTable, Logger, Numbers
from leaderless.observability.report.episodes import conversation
from leaderless.observability.report.unchecked_values import as_list, as_mapping, as_number, as_text

MAX_ROWS = 256
"""Number of rows of a table; the files of the run have all."""
MAX_CHARACTERS = 20_000
"""Length at which a text is cut."""
PREFIXES = {"step": "", "evaluation": "evaluation/"}
"""Beginning of the names of tables, by the kind of step."""


def tables_of(directory: Path, kind: str, step: int) -> Iterator[LoggedTable]:
    """The tables of a step, or of the evaluation after it, as far as the run has recorded them."""
    for name, rows in (("samples", _samples(directory, kind, step)), ("episodes", _episodes(directory, kind, step))):
        found = list(rows)
        if found:
            columns = list(dict.fromkeys(column for row in found for column in row))
            cells = [[row.get(column) for column in columns] for row in found]
            yield LoggedTable(PREFIXES[kind] + name, step, columns, cells)


def _samples(directory: Path, kind: str, step: int) -> Iterator[Mapping[str, Cell]]:
    room = MAX_ROWS
    for path in sorted((directory / "samples").glob(f"{kind}-{step:06d}.rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:room]:
            try:
                row = as_mapping(json.loads(line))
            except ValueError:
                continue
            room -= 1
            yield {
                "prompt": _clip(as_text(row.get("prompt"))),
                "response": _clip(as_text(row.get("response"))),
                "answer": _clip(as_text(row.get("answer"))),
                "reward": as_number(row.get("reward")),
                "advantage": as_number(row.get("advantage")),
                "is_valid": row.get("is_valid") is not False,
                "is_truncated": row.get("is_truncated") is True,
                "role": as_text(row.get("role")),
            } | {
                f"reward/{name}": as_number(as_mapping(detail).get("value"))
                for name, detail in as_mapping(row.get("details")).items()
            }


def _episodes(directory: Path, kind: str, step: int) -> Iterator[Mapping[str, Cell]]:
    folder = directory / "episodes" / f"{kind}-{step:06d}"
    rewards: dict[str, list[float]] = {}  # one for each agent
    for path in sorted(folder.glob("graded.rank-*.jsonl.gz")):
        for line in _lines(path):
            rewards.setdefault(as_text(line.get("id")), []).append(as_number(line.get("reward")) or 0.0)
    room = MAX_ROWS
    for path in sorted(folder.glob("played.rank-*.jsonl.gz")):
        for line in _lines(path):
            if not room:
                return
            room -= 1
            number = as_text(line.get("id"))
            talk = conversation(line)
            messages = [as_mapping(message) for message in as_list(talk["messages"])]
            said = [message for message in messages if message.get("kind") == "said"]
            own = [as_number(message.get("reward")) or 0.0 for message in said]
            yield {
                "episode": number,
                "agents": ", ".join(map(as_text, as_list(talk["agents"]))),
                "end": as_text(talk["cause"]),
                "error": _clip(as_text(talk["error"])),
                "turns": len(said),
                "tokens": sum(int(as_number(message.get("tokens")) or 0) for message in said),
                "reward of turns": sum(own),
                "reward": fmean(rewards[number]) if number in rewards else None,
                "conversation": _clip("\n\n".join(f"{one.get('who')}: {one.get('text')}" for one in messages)),
            }


def _lines(path: Path) -> Sequence[Mapping[str, object]]:
    """The lines of a file of episodes; none if it is damaged, or about to be removed by a run."""
    try:
        return list(read_episode_file(path))
    except ValueError:
        return ()


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"


IDENTITY, NUMBERS, TABLE = "identity", "numbers", "table"


class SentJournal:
    """The journal of a logger, which keeps a run that continues from sending anything twice.

    It is in the folder of the run. Steps come with a checksum of their line.
    """

    def __init__(self, path: Path) -> None:
        """Read what earlier starts have written."""
        self._path = path
        self.identity = ""  # of the tracker's run; empty if none has begun
        self.tables: set[tuple[str, int]] = set()  # that were sent, by name and step
        self._sums: dict[str, dict[int, int]] = {}
        self._last: dict[str, int] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        self._is_cut_off = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                kind, *rest = json.loads(line)
                self._take(kind, *rest)
            except (ValueError, TypeError):
                continue  # cut off by a crash

    def last(self, log: str) -> int:
        """The last step of a log that was sent; -1 if there is none."""
        return self._last.get(log, -1)

    def has(self, log: str, step: int, line: bytes) -> bool:
        """Whether this line of a log was sent as the numbers of a step."""
        return self._sums.get(log, {}).get(step) == zlib.crc32(line)

    def begin(self, identity: str) -> None:
        """Record the identity of the tracker's run."""
        if identity != self.identity:
            self._add([(IDENTITY, identity)])

    def add_numbers(self, log: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """Record steps of a log, each with its line."""
        self._add([(NUMBERS, log, step, zlib.crc32(line)) for step, line in lines])

    def add_table(self, name: str, step: int) -> None:
        """Record a table."""
        self._add([(TABLE, name, step)])

    def _add(self, entries: Iterable[tuple[object, ...]]) -> None:
        entries = list(entries)
        for entry in entries:
            self._take(*entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            if self._is_cut_off:
                file.write("\n")  # else the next entry would join one cut off by a crash
                self._is_cut_off = False
            file.write("".join(json.dumps(entry) + "\n" for entry in entries))

    def _take(self, kind: object, *rest: object) -> None:
        if kind == IDENTITY:
            (self.identity,) = map(str, rest)
        elif kind == TABLE:
            name, step = rest
            self.tables.add((str(name), int(str(step))))
        elif kind == NUMBERS:
            log, step, checksum = rest
            self._sums.setdefault(str(log), {})[int(str(step))] = int(str(checksum))
            self._last[str(log)] = int(str(step))


EVALUATION = "evaluation"
"""Log of evaluations on ranks that run ahead, written at few steps."""
BATCH_STEPS = 500
"""Largest number of steps that a logger gets at a time."""


def log_of(path: Path) -> str:
    """The name of a log, by its file; empty for the loop that trains."""
    return path.stem.removeprefix("metrics").removeprefix("-")


def numbers_of(log: str, step: int, record: Mapping[str, object]) -> Numbers:
    """The numbers of a line of a log."""
    values = {
        name: math.nan if value is None else float(value)
        for name, value in record.items()
        if name != "step" and (value is None or isinstance(value, int | float))
    }
    return Numbers(log, step, values)


class Follower:
    """Follows the folder of a run for one logger, which is open. Only checksums and one batch are kept in memory.

    A step has tables after each `tables_every_steps`, or never if it is 0.
    """

    def __init__(self, run: LoggedRun, logger: Logger, sent: SentJournal, tables_every_steps: int) -> None:
        self._run, self._logger, self._sent, self._every = run, logger, sent, tables_every_steps
        self._files: dict[str, GrowingFile] = {}
        self._batch: list[tuple[Numbers, bytes]] = []
        self._due: list[tuple[str, int]] = []

    def follow(self, *, is_over: bool = False) -> None:
        """Send new data. If the logger raises, the next call continues with the same data.

        When the run is over, all files in the folder are complete.
        """
        self._flush()
        for path in sorted(self._run.directory.glob("metrics*.jsonl")):
            log = log_of(path)
            file = self._files.setdefault(log, GrowingFile(path))
            for numbers, line in self._new(log, file):
                self._batch.append((numbers, line))
                if len(self._batch) == BATCH_STEPS:
                    self._flush()
            self._flush()
        self._send_tables(is_over=is_over)

    def finish(self, *files: Path) -> None:
        """Send the files of the run that exist at its end."""
        for path in files:
            if path.exists():
                self._logger.write_file(path)

    def _new(self, log: str, file: GrowingFile) -> Iterator[tuple[Numbers, bytes]]:
        for line in file.new_lines():
            step = line.record.get("step")
            if isinstance(step, int) and self._is_new(log, step, line):
                numbers = numbers_of(log, step, line.record)
                self._note_tables(log, step, numbers.values)
                yield numbers, line.text

    def _is_new(self, log: str, step: int, line: FileLine) -> bool:
        """Whether to send a step: it is the next one, or was repeated and the tracker can forget the earlier values."""
        if self._batch and step <= self._batch[-1][0].step:
            self._flush()
        if step > self._sent.last(log):
            return True
        return not self._sent.has(log, step, line.text) and self._logger.rewind(log, step)

    def _note_tables(self, log: str, step: int, values: Mapping[str, float]) -> None:
        if not self._every:
            return
        if log != EVALUATION and step and (step == 1 or step % self._every == 0):
            self._due.append(("step", step))
        if any(name.startswith("evaluation/") for name in values):
            self._due.append(("evaluation", step))

    def _flush(self) -> None:
        if self._batch:
            self._logger.write([numbers for numbers, _ in self._batch])
            log = self._batch[0][0].log
            self._sent.add_numbers(log, [(numbers.step, line) for numbers, line in self._batch])
            self._batch.clear()

    def _send_tables(self, *, is_over: bool) -> None:
        """Send tables of steps after which every loop has ended another: by then all ranks have written their samples.

        A loop that runs ahead says nothing about the samples of one that is behind it.
        """
        last = min(self._sent.last(log) for log in {"", *self._files} - {EVALUATION})
        for kind, step in list(self._due):
            if step >= last and not is_over:
                continue
            for table in tables_of(self._run.directory, kind, step):
                if (table.name, step) not in self._sent.tables:
                    self._logger.write_table(table)
                    self._sent.add_table(table.name, step)
            self._due.remove((kind, step))
