"""Which of the recorded samples a page holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leaderless.observability.report.samples import Judge, RecordedStep, read_step
from leaderless.observability.report.untrusted import parse_json_lines, read_text

BUDGET_BYTES = 4_000_000
"""What all samples on a page may take."""

_FILE_NAME = re.compile(r"step-(\d+)(?:\.rank-(\d+))?\.jsonl")


@dataclass(frozen=True)
class Samples:
    """What the page shows of `samples/`.

    Attributes:
        steps: The steps on the page, ascending.
        num_recorded_steps: Steps that have files.
        problems: Files and lines that could not be read.
        budget_bytes: What the steps may take in the page.
    """

    steps: tuple[RecordedStep, ...] = ()
    num_recorded_steps: int = 0
    problems: tuple[str, ...] = ()
    budget_bytes: int = BUDGET_BYTES

    @property
    def num_samples(self) -> int:
        """Samples on the page."""
        return sum(len(group.samples) for step in self.steps for group in step.groups)

    @property
    def example_error(self) -> str:
        """The newest error of a reward, with its step and the reward's name; empty when none was recorded."""
        for recorded in reversed(self.steps):
            for group in recorded.groups:
                for sample in group.samples:
                    for detail in sample.details:
                        if detail.error:
                            return f"step {recorded.step}, {detail.name}: {detail.error}"
        return ""


def read_samples(folder: Path, judge: Judge, budget_bytes: int = BUDGET_BYTES) -> Samples:
    """Read the samples of evenly spread steps, the first and the last among them, within the budget.

    Args:
        folder: `samples/` of a run directory; it may be missing.
        judge: Tells correct from wrong.
        budget_bytes: What they may take in the page.
    """
    reader = _Reader(judge, _files_by_step(folder))
    every_step = sorted(reader.files)
    # A prompt stands in a file once per response and in the page once, so files may be larger than the budget.
    count = _num_fitting(every_step, len(every_step), reader.file_bytes, 4 * budget_bytes)
    count = _num_fitting(every_step, count, lambda step: reader.read(step).size_bytes, budget_bytes)
    recorded = [reader.read(step) for step in _spread(every_step, count)]
    if sum(one.size_bytes for one in recorded) > budget_bytes:
        recorded = [one.cut(budget_bytes // len(recorded)) for one in recorded]
    return Samples(tuple(recorded), len(every_step), tuple(reader.problems), budget_bytes)


@dataclass
class _Reader:
    """Reads each step once."""

    judge: Judge
    files: Mapping[int, Sequence[Path]]
    problems: list[str] = field(default_factory=list)
    _steps: dict[int, RecordedStep] = field(default_factory=dict)

    def file_bytes(self, step: int) -> int:
        return sum(path.stat().st_size for path in self.files[step])

    def read(self, step: int) -> RecordedStep:
        if step not in self._steps:
            rows = [row for path in self.files[step] for row in self._rows(path)]
            self._steps[step] = read_step(step, rows, self.judge)
        return self._steps[step]

    def _rows(self, path: Path) -> list[Mapping[str, object]]:
        name = f"samples/{path.name}"
        try:
            rows, num_broken = parse_json_lines(read_text(path))
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}.")
            return []
        if num_broken:
            self.problems.append(f"{name}: {num_broken} lines are no JSON objects and were passed over.")
        return rows


def _files_by_step(folder: Path) -> dict[int, list[Path]]:
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE_NAME.fullmatch(path.name)
        if match and path.is_file():
            found.append((int(match[1]), int(match[2] or -1), path))
    files: dict[int, list[Path]] = {}
    for step, _, path in sorted(found):
        files.setdefault(step, []).append(path)
    return files


def _num_fitting(steps: Sequence[int], count: int, size_of: Callable[[int], int], limit: int) -> int:
    """How many evenly spread steps, at most `count`, fit into the limit; never fewer than the first and the last."""
    while count > 2 and (total := sum(map(size_of, _spread(steps, count)))) > limit:
        count = max(2, min(count - 1, count * limit // total))
    return count


def _spread(steps: Sequence[int], count: int) -> Sequence[int]:
    """So many of the steps, evenly spread from the first to the last."""
    if count == len(steps):
        return steps
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]
