"""Asks a server with OpenAI's API, and says of what goes wrong whether it helps to ask again. Imports no torch."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from leaderless.base.values import Json
from leaderless.config.judges import JudgeOptions
from leaderless.observability.hidden_values import without_secrets
from leaderless.rewards.judges.cache import JudgeAnswer
from leaderless.rewards.judges.prompts import Message

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
        """The answer to messages.

        Args:
            messages: Messages of a chat.
            deadline: Time of the monotonic clock by which it must be there.

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
            raise self._error(f"the connection broke ({_named(error)}): is it running?", may_repeat=True) from error
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


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
