"""The proof of a run: one line for each step, each with the hash of the line before it. Imports no torch.

    proof.jsonl    {"step": 1, "previous": "000...", ..., "hash": "5f2..."}
                   {"step": 2, "previous": "5f2...", ..., "hash": "c07..."}

A line holds hashes of what the step was made of and of what it has left: see `leaderless.worker.step_proof`. Whoever
has the hash of the last line can tell whether any line before it was changed. With a key each line is also signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import MANIFEST, RunDirectory, list_checkpoints, read_lines

FIRST = "0" * 64
"""Hash in place of the one of a line before the first."""
KEY_VARIABLE, KEY_FILE_VARIABLE = "LEADERLESS_PROOF_KEY", "LEADERLESS_PROOF_KEY_FILE"
"""Environment variables with the key that signs lines, or with the name of a file that holds it."""
RECORDED, LINES = "recorded", "lines"
"""Names of the sums over rows that are in the folder of the run byte by byte, and over all lines about samples."""
SUM_BITS = 120
"""Bits of a sum of hashes of rows."""


@dataclass(frozen=True)
class RowSum:
    """Hashes of some rows, added up modulo 2^120: it depends neither on their order nor on the rank that has them.

    Attributes:
        count: Number of rows.
        total: Sum of their hashes.
    """

    count: int = 0
    total: int = 0

    @classmethod
    def of(cls, hashes: list[int]) -> RowSum:
        """The sum of some hashes."""
        return cls(len(hashes), sum(hashes) % (1 << SUM_BITS))

    def __add__(self, other: RowSum) -> RowSum:
        """The sum of both."""
        return RowSum(self.count + other.count, (self.total + other.total) % (1 << SUM_BITS))

    def to_json(self) -> dict[str, Json]:
        """The sum as a line holds it."""
        return {"count": self.count, "sum": f"{self.total:030x}"}


def text_hash(text: str | bytes) -> int:
    """Hash of a text as a summand of a `RowSum`."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=SUM_BITS // 8).digest(), "little")


def hash_of(value: Json) -> str:
    """SHA-256 of a JSON value, which does not depend on the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def line_hash(line: Mapping[str, Json]) -> str:
    """Hash of a line: of all that it holds but this hash itself and the signature."""
    return hash_of({name: value for name, value in line.items() if name not in {"hash", "signature"}})


def sign(key: bytes, line_hash: str) -> str:
    """Signature of a line by its hash, HMAC-SHA-256."""
    return hmac.new(key, line_hash.encode(), hashlib.sha256).hexdigest()


def proof_key(file: Path | None = None) -> bytes | None:
    """The key that a file holds, or that the environment names; None if there is none.

    Raises:
        RecipeError: The file cannot be read, or holds nothing.
    """
    named = os.environ.get(KEY_FILE_VARIABLE)
    path = file or (Path(named) if named else None)
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").encode() or None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise RecipeError.at("", f"the key of the proof, {path}, cannot be read: {error.strerror}") from error
    if not key:
        raise RecipeError.at("", f"the key of the proof, {path}, is empty: write a key into it")
    return key


class ProofLog:
    """Writes the proof of a run; only one rank does so."""

    def __init__(self, directory: RunDirectory, key: bytes | None) -> None:
        """Append to `proof.jsonl`, and sign lines with a key if there is one."""
        self._directory, self._key = directory, key
        self._lines = LineFile(directory.proof, "step", directory.may_fail)
        self._previous = FIRST
        self._known: dict[str, Json] = {}
        self._left: dict[str, Json] = {}

    def open(self, step: int) -> None:
        """Begin with this step, or continue; lines of it and of later steps are dropped.

        Checkpoints of these steps, which the run does not continue from, may stay: the next line says so.
        """
        self._lines.cut_after(step - 1)
        self._previous, self._known = FIRST, {}
        for line in read_lines(self._directory.proof, "step"):
            self._previous = str(line.get("hash"))
            self._known |= cast("dict[str, Json]", line.get("checkpoints", {}))
        self._left = {name: value for name, value in self._manifests().items() if _step_in(name) >= step}
        self._known |= self._left

    def write(self, step: int, facts: Mapping[str, Json]) -> None:
        """Add the line of a step, with the checkpoints that have been written since the line before."""
        line: dict[str, Json] = {"step": step, "previous": self._previous, **facts}
        if new := self._new_checkpoints():
            line["checkpoints"] = new
        if self._left:
            line["left"], self._left = self._left, {}
        self._append(line)

    def close(self, step: int) -> None:
        """Add a line about the checkpoints that were written after the last step, if there are any."""
        if new := self._new_checkpoints():
            self._append({"step": step, "previous": self._previous, "is_end": True, "checkpoints": new})

    def _append(self, line: dict[str, Json]) -> None:
        self._previous = line["hash"] = line_hash(line)
        if self._key is not None:
            line["signature"] = sign(self._key, self._previous)
        self._lines.append(line)

    def _new_checkpoints(self) -> dict[str, Json]:
        """Hash of the manifest of each checkpoint that no line names yet."""
        new = {name: value for name, value in self._manifests().items() if self._known.get(name) != value}
        self._known |= new
        return new

    def _manifests(self) -> dict[str, Json]:
        """Hash of the manifest of each checkpoint, by its name."""
        found = list_checkpoints(self._directory.checkpoints)
        return {path.name: hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest() for path in found}


def _step_in(name: str) -> int:
    return int(name.removeprefix("step-"))
