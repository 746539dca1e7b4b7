"""Asks a server with OpenAI's API, says of what goes wrong whether it helps to ask again, and keeps the answers.

With answers that are kept, nothing is asked twice, and a run that resumes has the same rewards. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from leaderless.base.values import Json
from leaderless.config.judges import JudgeOptions
from leaderless.observability.clock import MayFail
from leaderless.observability.hidden_values import without_secrets
from leaderless.observability.run_directory import write_atomically
from leaderless.rewards.judges.verdicts import Message


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

    def __init__(self, file: Path | None, size: int, may_fail: MayFail = nullcontext) -> None:
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


MAX_ANSWER_BYTES = 1 << 22
"""Largest answer of a server that is read."""
MAX_ERROR_CHARACTERS = 300
"""Characters of a server's error that are shown."""
_PIECE = 1 << 16
_TRANSIENT = {408, 409, 425, 429}
"""Statuses after which it helps to ask again, besides the statuses of a server in trouble."""
_REMEDIES = {
    400: "look at the judge's `model` and `request`",
    401: "look at the key in the variable that api_key_env names",
    403: "look at the key in the variable that api_key_env names",
    404: "look at the judge's `url` and `model`",
}


class RequestError(Exception):
    """A request without an answer.

    Attributes:
        may_repeat: Whether it may help to ask again.
        wait_s: Seconds after which the server wants to be asked again; None if it does not say.
    """

    def __init__(self, message: str, *, may_repeat: bool, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.may_repeat, self.wait_s = may_repeat, wait_s


class ChatClient:
    """Asks a server; several threads may use it at the same time. Proxies are not used, and redirects not followed."""

    def __init__(self, options: JudgeOptions) -> None:
        """Read the key of the server; nothing connects before the first request.

        Raises:
            ValueError: The environment does not have the key.
        """
        assert options.url is not None, "judges that are roles are asked by their engines"
        self._options, self._key = options, options.key()
        self._url = urlsplit(options.url)
        self._open: dict[HTTPConnection, float] = {}
        self._lock = threading.Lock()

    def body(self, messages: Sequence[Message]) -> dict[str, Json]:
        """Body of a request for an answer to messages."""
        options = self._options
        fields: dict[str, Json] = {
            "model": options.model,
            "messages": [dict(message) for message in messages],
            "temperature": options.temperature,
            "max_tokens": options.max_answer_tokens,
            **options.request,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def ask(self, messages: Sequence[Message], deadline: float) -> JudgeAnswer:
        """The answer to messages, by a time of the monotonic clock.

        Raises:
            RequestError: There is none.
        """
        body = json.dumps(self.body(messages)).encode()
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        left_s = max(0.001, deadline - time.monotonic())
        connection = kind(self._url.hostname or "", self._url.port, timeout=left_s)
        with self._lock:
            self._open[connection] = deadline
        try:
            status, headers, text = self._exchange(connection, body, deadline)
        except (OSError, HTTPException) as error:
            if time.monotonic() >= deadline or isinstance(error, TimeoutError):
                raise RequestError("no answer in time", may_repeat=False) from error
            named = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise self._error(f"the connection broke ({named}): is it running?", may_repeat=True) from error
        finally:
            with self._lock:
                del self._open[connection]
            connection.close()
        if status != 200:
            raise self._refusal(status, headers, text)
        return self._answer_in(text)

    def end_late(self) -> None:
        """End exchanges that are past their deadlines, such as with a server that sends a byte now and then."""
        now = time.monotonic()
        with self._lock:
            for connection, deadline in self._open.items():
                if now > deadline and isinstance(connection.sock, socket.socket):
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _exchange(self, connection: HTTPConnection, body: bytes, deadline: float) -> tuple[int, Mapping[str, str], str]:
        headers = {"content-type": "application/json", "accept": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        connection.request("POST", f"{self._url.path}/chat/completions", body, headers)
        response = connection.getresponse()
        answer = self._read(response, deadline)
        given = {name.lower(): value for name, value in response.getheaders()}
        return response.status, given, answer.decode(errors="replace")

    def _read(self, response: HTTPResponse, deadline: float) -> bytes:
        pieces, size = [], 0
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise self._error(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes", may_repeat=True)
            if time.monotonic() > deadline:
                raise TimeoutError
        if response.length:
            raise self._error("the connection broke in the middle of its answer", may_repeat=True)
        return b"".join(pieces)

    def _refusal(self, status: int, headers: Mapping[str, str], text: str) -> RequestError:
        shown = " ".join(text.split())[:MAX_ERROR_CHARACTERS]
        may_repeat = status in _TRANSIENT or status >= 500
        remedy = "" if may_repeat else f"; {_REMEDIES.get(status, 'look at its address')}"
        wait_s = _seconds(headers.get("retry-after", "")) if may_repeat else None
        return self._error(f"it answered with status {status}: {shown}{remedy}", may_repeat=may_repeat, wait_s=wait_s)

    def _answer_in(self, text: str) -> JudgeAnswer:
        try:
            choice = json.loads(text)["choices"][0]
            content = choice["message"].get("content")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = " ".join(text.split())[:MAX_ERROR_CHARACTERS]
            raise self._error(f"its answer is not in the format of OpenAI: {shown}", may_repeat=True) from error
        if isinstance(content, list):
            content = "".join(str(one.get("text", "")) for one in content if isinstance(one, dict))
        return JudgeAnswer(content if isinstance(content, str) else "", choice.get("finish_reason") == "length")

    def _error(self, what: str, *, may_repeat: bool, wait_s: float | None = None) -> RequestError:
        text = without_secrets(f"the server at {self._options.url}: {what}")
        if self._key:
            text = text.replace(self._key, f"<{self._options.api_key_env}>")
        return RequestError(text, may_repeat=may_repeat, wait_s=wait_s)


def _seconds(text: str) -> float | None:
    """Seconds until the time that a header names, as a number or a date; None if it names none."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
