"""Answers of judges that are kept, so that nothing is asked twice, and a run that resumes has the same rewards."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from leaderless.base.values import Json
from leaderless.observability.clock import MayFail
from leaderless.observability.run_directory import write_atomically


@dataclass(frozen=True)
class JudgeAnswer:
    """Answer of a judge.

    Attributes:
        text: Its words.
        is_cut: Whether they end at the largest number of tokens.
    """

    text: str
    is_cut: bool = False


def key_of(asked: Mapping[str, Json]) -> str:
    """The key of an answer: a hash of all that it depends on, the model, the messages and the settings of sampling."""
    plain = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


class AnswerCache:
    """The newest answers of judges, in memory and in a file that one process appends to.

    Files of other processes in the same folder are read at the beginning, so that a run may resume on other ranks.

    Args:
        file: File of this process; None to keep answers in memory alone.
        size: Largest number of answers to keep.
        may_fail: Context in which files are written.
    """

    def __init__(
        self,
        file: Path | None,
        size: int,
        may_fail: MayFail = nullcontext,
    ) -> None:
        self._file, self._size, self._may_fail = file, size, may_fail
        self._answers: dict[str, JudgeAnswer] = {}
        self._num_lines = 0
        self._is_read = False
        self._lock = threading.Lock()

    def get(self, key: str) -> JudgeAnswer | None:
        """The answer of a key, if it is known."""
        with self._lock:
            self._read()
            return self._answers.get(key)

    def put(self, key: str, answer: JudgeAnswer) -> None:
        """Keep an answer; the oldest one is forgotten if there are too many."""
        if self._size == 0:
            return
        with self._lock:
            self._read()
            self._keep(key, answer)
            if self._file is not None:
                with self._may_fail(self._file):
                    self._write(self._file, key, answer)

    def _keep(self, key: str, answer: JudgeAnswer) -> None:
        self._answers.pop(key, None)
        self._answers[key] = answer
        while len(self._answers) > self._size:
            del self._answers[next(iter(self._answers))]

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        if self._file is None or self._size == 0:
            return
        # Its own file comes last: what it has are the newest answers.
        for path in sorted(self._file.parent.glob("*.jsonl"), key=lambda path: (path == self._file, path.name)):
            lines = _lines(path)
            self._num_lines = len(lines) if path == self._file else 0
            for key, answer in lines:
                self._keep(key, answer)

    def _write(self, file: Path, key: str, answer: JudgeAnswer) -> None:
        """Add a line, which is in the system's hands before anything depends on it; shorten a file of old answers."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._num_lines += 1
        if self._num_lines > 2 * self._size:
            write_atomically(file, "".join(_line(*one) for one in self._answers.items()))
            self._num_lines = len(self._answers)
            return
        with file.open("ab+") as lines:
            # A killed process, or a full disk, may have left the beginning of a line.
            is_whole = lines.seek(0, 2) == 0 or (lines.seek(-1, 2), lines.read(1))[1] == b"\n"
            lines.write((("" if is_whole else "\n") + _line(key, answer)).encode())


def _line(key: str, answer: JudgeAnswer) -> str:
    return json.dumps({"key": key, "text": answer.text, **({"cut": True} if answer.is_cut else {})}) + "\n"


def _lines(path: Path) -> Sequence[tuple[str, JudgeAnswer]]:
    """The answers in a file; lines that are damaged are left out."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        key, text = record.get("key"), record.get("text")
        if isinstance(key, str) and isinstance(text, str):
            found.append((key, JudgeAnswer(text, record.get("cut") is True)))
    return found
