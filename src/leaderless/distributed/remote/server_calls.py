"""Calls of a server in another process, over HTTP, with a token that it shares with this rank."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

from leaderless.base.values import Json
from leaderless.distributed.remote.messages import BYTES, NUMBER, framed


class EngineError(RuntimeError):
    """An engine in another process died, hangs, or answered with an error."""


class ServerCalls:
    """Calls of one server. A subclass starts it, or finds it.

    Attributes:
        name: Server in words, for errors.
        answer_timeout_s: Longest time without an answer.
        host: Name or address of its machine.
        port: Number of its port.
        token: Key that it expects.
    """

    def __init__(self, name: str, answer_timeout_s: float, section: str) -> None:
        """Call nothing yet; `section` is that of the recipe which has the limit."""
        self.name, self.answer_timeout_s, self._section = name, answer_timeout_s, section
        self.host, self.port, self.token = "127.0.0.1", 0, ""
        self._session = ""
        self._kept: http.client.HTTPConnection | None = None
        self._num_numbered = 0

    def call(self, path: str, body: Json) -> Json:
        """Call a path of the server, and return the answer; text that is not JSON is returned as it is.

        Raises:
            EngineError: The server is not there, does not answer in time, or answers with an error.
        """
        with self._answer(path, body) as response:
            return _content(response.read())

    def call_numbered(self, path: str, body: Json, data: memoryview | None = None) -> Json:
        """Like `call`, for a server that is a `Handler`, over a connection that is kept from call to call.

        If that is lost, the call is sent again over another one. By its number the server knows whether it has arrived
        before, and what the answer was. Only one thread makes such calls. Bytes may go with it, as they are.
        """
        self._num_numbered += 1
        headers = {**self._headers, NUMBER: f"{self._session}{self._num_numbered}"}
        parts = [json.dumps(body).encode()] if data is None else framed(body, data)
        headers["Content-Type"] = "application/json" if data is None else BYTES
        headers["Content-Length"] = str(sum(len(part) for part in parts))
        for is_last in (False, True):
            try:
                status, answer = self._exchange(path, parts, headers)
                break
            except (OSError, http.client.HTTPException) as error:
                self.hang_up()
                if isinstance(error, TimeoutError):
                    raise self.failed_to_answer(path) from error
                if is_last:
                    raise self.broke_off(path) from error
        if status != http.client.OK:
            raise self._refused(path, status, answer)
        return _content(answer)

    def _exchange(
        self, path: str, parts: Iterable[bytes | memoryview], headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        self._kept = self._kept or self._connect()
        self._kept.request("POST", path, parts, headers)
        response = self._kept.getresponse()
        return response.status, response.read()

    def hang_up(self) -> None:
        """Close the connection that is kept."""
        if self._kept is not None:
            if self._kept.sock is not None:
                with suppress(OSError):  # so that the server notices even if a forked process has the socket, too
                    self._kept.sock.shutdown(socket.SHUT_RDWR)
            self._kept.close()
            self._kept = None

    def stream(self, path: str, body: Json) -> Iterator[bytes]:
        """Like `call`, but yield each line that is not empty; other threads may make calls at the same time."""
        with self._answer(path, body) as response:
            yield from filter(None, map(bytes.strip, response))

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=self.answer_timeout_s)

    @contextmanager
    def _answer(self, path: str, body: Json) -> Iterator[http.client.HTTPResponse]:
        # The server may close a connection that is kept, and then it would be unknown whether a call has arrived.
        with closing(self._connect()) as connection:
            try:
                connection.request("POST", path, json.dumps(body), self._headers | {"Content-Type": "application/json"})
                response = connection.getresponse()
                if response.status != http.client.OK:
                    raise self._refused(path, response.status, response.read())
                yield response
            except TimeoutError as error:
                raise self.failed_to_answer(path) from error
            except (OSError, http.client.HTTPException) as error:
                raise self.broke_off(path) from error

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def close(self) -> None:
        """End what it serves."""
        self.hang_up()

    def broke_off(self, path: str) -> EngineError:
        """Make the error for an answer that was cut off."""
        return self._failed(f"broke off at {path}")

    def _refused(self, path: str, status: int, answer: bytes) -> EngineError:
        return self._failed(f"answered {path} with {status}: {answer.decode(errors='replace')[:2000]}")

    def failed_to_answer(self, path: str) -> EngineError:
        """Make the error for an answer that takes too long."""
        limit = f"{self._section}.answer_timeout_s={self.answer_timeout_s:g} s"
        return self._failed(f"did not answer {path} within {limit}")

    def _failed(self, what: str) -> EngineError:
        return EngineError(f"{self.name} {what}")


def _content(answer: bytes) -> Json:
    """Read an answer; text that is not JSON is taken as it is."""
    try:
        content: Json = json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")
    return content
