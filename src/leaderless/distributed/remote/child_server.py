"""A server process on this machine that serves only this rank: started, called, watched and stopped."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from leaderless.base.values import Json
from leaderless.distributed.remote.messages import NUMBER

LOG_LINES = 30
"""Lines of a server's log in an error."""
POLL_S = 0.5
"""Time between two checks of a server that starts."""
END_S = 10.0
"""Time for a server to end before it is killed."""

BOUND = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux':\n"
    "    ctypes.CDLL(None).prctl(1, 9)\n"
    "if os.getppid() != int(sys.argv.pop(1)):\n"
    "    sys.exit('the process that has started this one is gone')\n"
)
"""Code that asks the kernel for SIGKILL when the parent ends (PR_SET_PDEATHSIG); a parent that has ended is noticed."""

PACKAGE = Path(__file__).parents[2]
"""Folder of this package."""
IMPORT = (
    "import importlib.util\n"
    "folder = sys.argv[1]\n"
    "spec = importlib.util.spec_from_file_location(\n"
    "    'leaderless', folder + '/__init__.py', submodule_search_locations=[folder])\n"
    "sys.modules['leaderless'] = package = importlib.util.module_from_spec(spec)\n"
    "spec.loader.exec_module(package)\n"
)
"""Code that imports this package in another interpreter, and not the folder around it, which has all packages of this
process, including other versions of that interpreter's."""

PLACE_PREFIXES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of variables from which an engine would conclude that it is one of many workers."""


class EngineError(RuntimeError):
    """An engine in another process died, hangs, or answered with an error."""


class ChildServer:
    """An HTTP server in another process, on the loopback interface, with a token that only this rank knows.

    Args:
        name: Server in words, for errors.
        log: File that gets the server's output.
        start_timeout_s: Longest time until its first answer.
        answer_timeout_s: Longest time without an answer after that.
        beat: Function that is called while it starts, as a sign of life.
        section: Section of the recipe that has both limits.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        start_timeout_s: float,
        answer_timeout_s: float,
        beat: Callable[[], None],
        section: str = "rollout.external",
    ) -> None:
        self._section = section
        self._name, self._log, self._beat = name, log, beat
        self._start_timeout_s, self.answer_timeout_s = start_timeout_s, answer_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: http.client.HTTPConnection | None = None
        self._num_numbered = 0
        self.port, self.token = 0, ""

    def prepare(self) -> None:
        """Choose a free port and a new token."""
        self._hang_up()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.token = secrets.token_hex(32)

    def start(self, command: Sequence[str], greeting: str, variables: Mapping[str, str] | None = None) -> None:
        """Start the server, send it a line, and wait until it answers `/health`.

        It has the environment of this process, without what describes this worker, and with `variables`.

        Raises:
            EngineError: It has ended, or does not answer in time.
        """
        environment = {**worker_free_environment(), **(variables or {})}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.touch(mode=0o600)  # engines may print their settings, and the token among them
        with self._log.open("ab") as log:
            # In a new session: Ctrl-C at the terminal goes only to this process, which stops the server.
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            except OSError as error:
                raise EngineError(f"{self._name} cannot be started: {command[0]}: {error.strerror}") from error
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # a server that has ended is noticed below
            stdin.write(greeting.encode() + b"\n")
        end = time.monotonic() + self._start_timeout_s
        while not self._is_ready():
            if self._process.poll() is not None:
                raise self._failed(f"has ended with code {self._process.returncode} while it started")
            if time.monotonic() > end:
                self.close()
                raise self._failed(f"did not start within {self._section}.start_timeout_s={self._start_timeout_s:g} s")
            self._beat()
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        with closing(self._connect()) as connection, suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health", headers=self._headers)
            response = connection.getresponse()
            response.read()  # to close the connection earlier would be an error in the server's log
            return response.status == http.client.OK
        return False

    def call(self, path: str, body: Json) -> Json:
        """Call a path of the server, and return the answer; text that is not JSON is returned as it is.

        Raises:
            EngineError: The server is not there, does not answer in time, or answers with an error.
        """
        with self._answer(path, body) as response:
            return _content(response.read())

    def call_numbered(self, path: str, body: Json) -> Json:
        """Like `call`, for a server that is a `Handler`, over a connection that is kept from call to call.

        If that is lost, the call is sent again over another one. By its number the server knows whether it has arrived
        before, and what the answer was. Only one thread makes such calls.
        """
        self._num_numbered += 1
        headers = {**self._headers, "Content-Type": "application/json", NUMBER: str(self._num_numbered)}
        text = json.dumps(body)
        for is_last in (False, True):
            try:
                status, answer = self._exchange(path, text, headers)
                break
            except (OSError, http.client.HTTPException) as error:
                self._hang_up()
                if isinstance(error, TimeoutError):
                    raise self.failed_to_answer(path) from error
                if is_last:
                    raise self.broke_off(path) from error
        if status != http.client.OK:
            raise self._refused(path, status, answer)
        return _content(answer)

    def _exchange(self, path: str, text: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        self._kept = self._kept or self._connect()
        self._kept.request("POST", path, text, headers)
        response = self._kept.getresponse()
        return response.status, response.read()

    def _hang_up(self) -> None:
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
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.answer_timeout_s)

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

    def broke_off(self, path: str) -> EngineError:
        """Make the error for an answer that was cut off; a process ends a moment after its connections."""
        state = "and is not running"
        if self._process is not None:
            state = "though it is running"
            with suppress(subprocess.TimeoutExpired):
                state = f"as it has ended with code {self._process.wait(POLL_S)}"
        return self._failed(f"broke off at {path}, {state}")

    def _refused(self, path: str, status: int, answer: bytes) -> EngineError:
        return self._failed(f"answered {path} with {status}: {answer.decode(errors='replace')[:2000]}")

    def failed_to_answer(self, path: str) -> EngineError:
        """Make the error for an answer that takes too long."""
        limit = f"{self._section}.answer_timeout_s={self.answer_timeout_s:g} s"
        return self._failed(f"did not answer {path} within {limit}")

    def _failed(self, what: str) -> EngineError:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            lines = [f"(cannot be read: {error.strerror})"]
        end = "\n".join(f"  {line}" for line in lines[-LOG_LINES:])
        return EngineError(f"{self._name} {what}; the end of {self._log}:\n{end}")

    def close(self) -> None:
        """Stop the server and everything that it has started."""
        self._hang_up()
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        # Its leader may have left other processes behind.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _content(answer: bytes) -> Json:
    """Read an answer; text that is not JSON is taken as it is."""
    try:
        content: Json = json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")
    return content


def bound_command(python: str, program: str, *arguments: str) -> list[str]:
    """Make a command for a program that ends with this process, however this process ends.

    The interpreter uses neither this process's path nor packages of the user's home.
    """
    return [python, "-I", "-c", BOUND + program, str(os.getpid()), *arguments]


def package_command(python: str, module: str) -> list[str]:
    """Make a command for `main` of a module of this package in another interpreter; see `bound_command`."""
    return bound_command(python, f"{IMPORT}from {module} import main\nmain()\n", str(PACKAGE))


def worker_free_environment() -> dict[str, str]:
    """Copy this process's environment, without variables that describe its place among workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PLACE_PREFIXES)}
