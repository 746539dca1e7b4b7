"""The lines of a proof, and whether each follows from the one before it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from leaderless.base.values import Json
from leaderless.observability.proof_log import FIRST, LINES, RECORDED, RowSum, line_hash, sign
from leaderless.observability.run_directory import RunDirectory
from leaderless.run.verify.findings import ProofFinding

CHAIN, SIGNATURE = "chain", "signatures"


@dataclass(frozen=True)
class ProofLine:
    """A line of a proof.

    Attributes:
        number: Number of the line in the file, from 1.
        step: Step that it is about.
        record: All that it holds.
        is_end: Whether it only names checkpoints that were written after the step.
        rows: Sum over the rows of each node.
        recorded: Sum over the rows that are in the folder byte by byte; None where no node of the loop records any.
        lines: Sum over the lines about samples.
        recording_ranks: Ranks that have written them.
        weights: Digests of the weights of each role before and after the step.
        versions: Oldest and newest policy version of the tokens that were trained on, if they have one.
        checkpoints: Hash of the manifest of each checkpoint that it names.
        left: Hash of the manifest of each checkpoint whose step was done again, from an earlier one.
    """

    number: int
    step: int
    record: Mapping[str, Json]
    is_end: bool
    rows: Mapping[str, RowSum]
    recorded: RowSum | None
    lines: RowSum | None
    recording_ranks: Sequence[int]
    weights: Mapping[str, tuple[str, str]]
    versions: tuple[int, int] | None
    checkpoints: Mapping[str, str]
    left: Mapping[str, str]

    @classmethod
    def of(cls, number: int, record: Mapping[str, Json]) -> ProofLine:
        """A line by its content.

        Raises:
            ValueError: It is no line of a proof.
        """
        try:
            is_end = record.get("is_end") is True
            known = cast("dict[str, dict[str, dict[str, str]]]", record)
            weights = {} if is_end else known["weights"]
            versions = None if is_end else cast("list[int] | None", record["versions"])
            return cls(
                number,
                _integer(record["step"]),
                record,
                is_end,
                {} if is_end else {name: _sum_of(one) for name, one in cast("dict[str, Json]", record["rows"]).items()},
                None if is_end or record[RECORDED] is None else _sum_of(record[RECORDED]),
                None if is_end or record[LINES] is None else _sum_of(record[LINES]),
                [] if is_end else [_integer(rank) for rank in cast("list[Json]", record["recording_ranks"])],
                {role: (str(one["before"]), str(one["after"])) for role, one in weights.items()},
                None if versions is None else (_integer(versions[0]), _integer(versions[1])),
                *(
                    {str(name): str(one) for name, one in cast("dict[str, Json]", record.get(kind, {})).items()}
                    for kind in ("checkpoints", "left")
                ),
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError("it is no line of a proof") from error

    def text(self, name: str) -> str:
        """A text of the line, such as the hash of the recipe; empty if it has none."""
        return str(self.record.get(name, ""))


def _integer(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("no integer")
    return value


def _sum_of(value: Json) -> RowSum:
    fields = cast("dict[str, Json]", value)
    return RowSum(_integer(fields["count"]), int(str(fields["sum"]), 16))


def read_proof(directory: RunDirectory) -> tuple[list[ProofLine], list[ProofFinding]]:
    """The lines of a proof up to the first that cannot be read, and what is wrong with that."""
    lines: list[ProofLine] = []
    fails = partial(ProofFinding, CHAIN, "fails")
    texts = directory.proof.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        if not text:
            if number < len(texts):
                return lines, [fails("the line is empty: something has been removed", number)]
            continue
        try:
            record = json.loads(text)
            lines.append(ProofLine.of(number, record))
        except ValueError as error:
            if number == len(texts):
                cause = "the line is incomplete, as after a crash: continue the run, which writes it again"
                return lines, [fails(cause, number)]
            return lines, [fails(f"the line cannot be read: {error}", number)]
    return lines, []


def check_chain(lines: Sequence[ProofLine], key: bytes | None, head: str | None) -> list[ProofFinding]:
    """Check that each line follows the one before it, and its signature; the first mistake of each kind is found.

    Args:
        lines: Lines of the proof.
        key: Key that has signed them; None if it is not at hand.
        head: Hash of the last line as it is known from elsewhere; None if it is not.
    """
    broken = next(_broken(lines), None)
    if broken is None and head is not None and (not lines or lines[-1].text("hash") != head):
        cause = f"the last line has the hash {lines[-1].text('hash')[:16] if lines else 'of none'}, not {head[:16]}"
        broken = ProofFinding(CHAIN, "fails", f"{cause}: lines were cut off, added or written anew")
    if broken is None:
        since = "" if lines[0].step == 1 else f"; nothing proves the steps before {lines[0].step}"
        hash_ = lines[-1].text("hash")
        good = f"{len(lines)} lines, steps {lines[0].step} to {lines[-1].step}{since}; head {hash_}"
        broken = ProofFinding(CHAIN, "holds", good)
    return [broken, _check_signatures(lines, key)]


def _broken(lines: Sequence[ProofLine]) -> Iterator[ProofFinding]:
    """Mistakes in the chain, in the order of the lines."""
    previous, step, weights = FIRST, lines[0].step - 1, dict[str, str]()
    for line in lines:
        fails = partial(ProofFinding, CHAIN, "fails", line=line.number, step=line.step)
        if line_hash(line.record) != line.text("hash"):
            yield fails("the line is not what was written: its hash differs")
        if line.text("previous") != previous:
            yield fails(
                "the first line follows another one, which is missing"
                if line.number == 1
                else "the line does not follow the one before it: a line was changed, removed, moved or added"
            )
        if line.step != step + (not line.is_end):
            yield fails(f"step {line.step} follows step {step}: lines are missing or come twice")
        for role, (before, after) in line.weights.items():
            if weights.get(role, before) != before:
                yield fails(f"the weights of '{role}' before the step are not those after the step before")
            weights[role] = after
        previous, step = line.text("hash"), line.step


def _check_signatures(lines: Sequence[ProofLine], key: bytes | None) -> ProofFinding:
    signed = [line for line in lines if "signature" in line.record]
    if key is None:
        why = f"{len(signed)} lines are signed, and no key is given" if signed else "the lines are not signed"
        return ProofFinding(SIGNATURE, "not checked", why)
    for line in lines:
        if "signature" not in line.record:
            return ProofFinding(SIGNATURE, "fails", "the line is not signed", line.number, line.step)
        if not hmac.compare_digest(sign(key, line.text("hash")).encode(), line.text("signature").encode()):
            cause = "the signature is of another key, or of another line"
            return ProofFinding(SIGNATURE, "fails", cause, line.number, line.step)
    return ProofFinding(SIGNATURE, "holds", f"{len(signed)} lines are signed with this key")
