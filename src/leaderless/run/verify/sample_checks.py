"""Checks of the recorded samples of a run against its proof."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from leaderless.base.values import Json
from leaderless.data.row_hashes import RecordedRow
from leaderless.observability.proof_log import RowSum, text_hash
from leaderless.observability.run_directory import RunDirectory
from leaderless.run.verify.findings import ProofFinding
from leaderless.run.verify.proof_lines import ProofLine

SAMPLES, ROWS = "samples", "rows"


@dataclass(frozen=True)
class RecordedSample:
    """A sample in the folder of a run.

    Attributes:
        step: Step that it belongs to.
        rank: Rank that has written it.
        record: Record of it for people.
        row: Its row, byte by byte; None where there was no room for it.
    """

    step: int
    rank: int
    record: Mapping[str, Json]
    row: RecordedRow | None

    @classmethod
    def of(cls, step: int, rank: int, text: str) -> RecordedSample:
        """A sample by its line.

        Raises:
            ValueError: It is none.
        """
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("it is no object")
        row = RecordedRow.from_json(record["row"]) if "row" in record else None
        return cls(step, rank, record, row)

    @property
    def sample_id(self) -> int:
        """Id of the sample; -1 if the record has none."""
        return _integer(self.record.get("sample_id"))

    @property
    def group_id(self) -> int:
        """Id of its group; -1 if the record has none."""
        return _integer(self.record.get("group_id"))

    def number(self, name: str) -> float | None:
        """The number of a dense column of the row."""
        values = None if self.row is None else self.row.values(name)
        return float(values[0]) if values else None


def _integer(value: Json) -> int:
    return value if isinstance(value, int) else -1


def read_samples(directory: RunDirectory, step: int, rank: int) -> list[str]:
    """The lines about samples of a step that a rank has written; none if there are none."""
    path = directory.samples / f"step-{step:06d}.rank-{rank}.jsonl"
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _others(directory: RunDirectory, lines: Sequence[ProofLine]) -> int:
    """Number of files with samples of these steps by ranks that have not recorded any, as the proof says."""
    files = (path for line in lines for path in directory.samples.glob(f"step-{line.step:06d}.rank-*.jsonl"))
    known = {f"step-{line.step:06d}.rank-{rank}.jsonl" for line in lines for rank in line.recording_ranks}
    return sum(path.name not in known for path in files)


def check_samples(
    directory: RunDirectory, lines: Sequence[ProofLine], step: int | None
) -> tuple[list[ProofFinding], list[RecordedSample]]:
    """Check the recorded samples of each step, and their rows; returns the samples of steps that hold."""
    wanted = [line for line in lines if not line.is_end and step in {None, line.step}]
    recorded = [line for line in wanted if line.lines is not None]
    if not recorded:
        why = "no node of the loop that trains records samples" if wanted else "no line is about the step"
        return [ProofFinding(name, "not checked", why) for name in (SAMPLES, ROWS)], []
    good: list[RecordedSample] = []
    wrong: dict[str, ProofFinding] = {}
    num_lines = num_rows = num_all = 0
    for line in recorded:
        samples, found = _check_step(directory, line)
        for one in found:
            wrong.setdefault(one.check, one)
        if not found:
            good += samples
            num_lines += len(samples)
            num_rows += sum(one.row is not None for one in samples)
            num_all += _num_rows(line)
    others: list[ProofFinding] = []
    if num_others := _others(directory, recorded):
        why = f"{num_others} files are of ranks that recorded nothing in these steps, as of an earlier attempt at them"
        others.append(ProofFinding(SAMPLES, "not checked", why))
    holds = {
        SAMPLES: f"{num_lines} samples of {len(recorded)} steps",
        ROWS: f"{num_rows} of them are in the folder byte by byte, of {num_all} rows in all",
    }
    return [*(wrong.get(name) or ProofFinding(name, "holds", detail) for name, detail in holds.items()), *others], good


def _num_rows(line: ProofLine) -> int:
    return max((one.count for one in line.rows.values()), default=0)


def _check_step(directory: RunDirectory, line: ProofLine) -> tuple[list[RecordedSample], list[ProofFinding]]:
    """The samples of a step, and what is wrong with them."""
    samples: list[RecordedSample] = []
    total = RowSum()
    fails = partial(ProofFinding, line=line.number, step=line.step, status="fails")
    for rank in line.recording_ranks:
        texts = read_samples(directory, line.step, rank)
        for number, text in enumerate(texts, 1):
            try:
                samples.append(RecordedSample.of(line.step, rank, text))
            except ValueError as error:
                return [], [fails(SAMPLES, detail=f"line {number} of its samples cannot be read: {error}", rank=rank)]
        total += RowSum.of([text_hash(text) for text in texts])
    writer = line.recording_ranks[0] if len(line.recording_ranks) == 1 else None
    found: list[ProofFinding] = []
    if (problem := _row_problem(samples, line)) is not None:
        found.append(fails(ROWS, detail=problem[0], rank=problem[1] if problem[1] is not None else writer))
    assert line.lines is not None
    if total.count != line.lines.count:
        detail = f"{total.count} samples are recorded, {line.lines.count} were written"
        found.append(fails(SAMPLES, detail=detail, rank=writer))
    elif total != line.lines:
        found.append(fails(SAMPLES, detail="the recorded samples are not those that were written", rank=writer))
    return samples, found


def _row_problem(samples: Sequence[RecordedSample], line: ProofLine) -> tuple[str, int | None] | None:
    """What is wrong with the rows of a step, and the rank that has written them."""
    for sample in samples:
        if problem := _difference(sample):
            return f"sample {sample.sample_id}: {problem}", sample.rank
    kept = [(one.row, one) for one in samples if one.row is not None]
    total = RowSum.of([row.hash(one.sample_id, one.group_id) for row, one in kept])
    if total != line.recorded:
        return "the rows of the samples are not those of the step", None
    return None


def _difference(sample: RecordedSample) -> str:
    """How what people read of a sample differs from its row; empty if it does not."""
    if sample.row is None:
        return ""
    advantages = sample.row.values("advantages")
    pairs = {
        "reward": ("rewards", sample.number("rewards")),
        "is_valid": ("reward_valid", sample.number("reward_valid")),
        "is_truncated": ("truncated", sample.number("truncated")),
        "advantage": ("advantages", None if advantages is None else float(advantages[0]) if advantages else 0.0),
    }
    for name, (column, value) in pairs.items():
        shown = sample.record.get(name)
        if value is None or not isinstance(shown, int | float):
            continue
        if _as_float32(float(shown)) != value:
            return f"{name} is {shown}, but {column} of its row is {value:g}"
    return ""


def _as_float32(value: float) -> float:
    return cast("float", struct.unpack("f", struct.pack("f", value))[0])
