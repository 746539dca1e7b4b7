"""A server on this machine that serves this rank alone: started, asked, watched and ended."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from leaderless.config import Json

LOG_LINES = 30
"""Of a server's log in an error."""
POLL_S = 0.5
"""Between two looks at a server that starts."""
END_S = 10.0
"""Time for a server to end before it is killed."""


class EngineFailed(RuntimeError):
    """An engine in a process of its own has died, hangs, or has answered with an error."""


class ChildServer:
    """An HTTP server in a process of its own, on the loopback interface, with a token that only this rank has.

    Attributes:
        port: Where it listens.
        token: It wants with every call.
    """

    def __init__(
        self, name: str, log: Path, start_timeout_s: float, answer_timeout_s: float, beat: Callable[[], None]
    ) -> None:
        """Start nothing yet.

        Args:
            name: For errors.
            log: Takes what the server prints.
            start_timeout_s: Longest time until it answers.
            answer_timeout_s: Longest wait for an answer.
            beat: Called now and then while the server starts.
        """
        self._name, self._log, self._beat = name, log, beat
        self._start_timeout_s, self._answer_timeout_s = start_timeout_s, answer_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: http.client.HTTPConnection | None = None
        self.port = 0
        self.token = ""

    def prepare(self) -> None:
        """Choose a free port and a new token."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.token = secrets.token_hex(32)

    def start(self, command: Sequence[str], environment: Mapping[str, str], greeting: str, health: str) -> None:
        """Start the server, and wait until it answers.

        Args:
            command: To run.
            environment: Of the process.
            greeting: A line for its standard input.
            health: Path of a call that succeeds as soon as it is ready.

        Raises:
            EngineFailed: It has ended, or does not answer in time.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C at the terminal is for this process, which decides how the server ends.
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            except OSError as error:
                raise EngineFailed(f"{self._name} cannot be started: {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # one that has ended already is seen below
            stdin.write(greeting.encode() + b"\n")
        end = time.monotonic() + self._start_timeout_s
        while not self._is_ready(health):
            if self._process.poll() is not None:
                raise self._failed(f"has ended with code {self._process.returncode} while it started")
            if time.monotonic() > end:
                self.close()
                raise self._failed(
                    f"did not start within rollout.external.start_timeout_s={self._start_timeout_s:g} s"
                )
            self._beat()
            time.sleep(POLL_S)

    def _is_ready(self, health: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._answer_timeout_s)
        try:
            status, _ = self._exchange(connection, "GET", health, None)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return status == http.client.OK

    def call(self, path: str, body: Json) -> Json:
        """Ask for something.

        Args:
            path: Of the call, with a slash in front.
            body: Of the call.

        Returns:
            The answer.

        Raises:
            EngineFailed: The server is not there, does not answer in time, or answers with an error.
        """
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self._answer_timeout_s)
        try:
            status, answer = self._exchange(self._connection, "POST", path, body)
        except TimeoutError as error:
            limit = f"rollout.external.answer_timeout_s={self._answer_timeout_s:g} s"
            raise self._failed(f"did not answer {path} within {limit}") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(f"broke off at {path}, {self._state()}") from error
        if status != http.client.OK:
            raise self._failed(f"answered {path} with {status}: {answer.decode(errors='replace')[:2000]}")
        try:
            content: Json = json.loads(answer) if answer else None
        except ValueError as error:
            raise self._failed(f"answered {path} with what is no JSON: {answer[:200]!r}") from error
        return content

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Json
    ) -> tuple[int, bytes]:
        content = None if method == "GET" else json.dumps(body)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _state(self) -> str:
        """Whether the process is there; a moment later, as its end is seen after that of its connections."""
        if self._process is None:
            return "and is not running"
        with suppress(subprocess.TimeoutExpired):
            return f"as it has ended with code {self._process.wait(POLL_S)}"
        return "though it is running"

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"{self._name} {what}; the end of {self._log}:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"(cannot be read: {error.strerror})"
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])

    def close(self) -> None:
        """End the server and all that it has started."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        # Its leader may have ended and left others of its group behind.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
