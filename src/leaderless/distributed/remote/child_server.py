"""A server process on this machine that serves only this rank: started, called, watched and stopped."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from typing_extensions import override

from leaderless.distributed.remote.server_calls import EngineError, ServerCalls

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


class ChildServer(ServerCalls):
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
        super().__init__(name, answer_timeout_s, section)
        self._log, self._beat, self._start_timeout_s = log, beat, start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Choose a free port and a new token."""
        self.hang_up()
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
                raise EngineError(f"{self.name} cannot be started: {command[0]}: {error.strerror}") from error
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

    @override
    def broke_off(self, path: str) -> EngineError:
        """Say how the process has ended, a moment after its connections."""
        state = "and is not running"
        if self._process is not None:
            state = "though it is running"
            with suppress(subprocess.TimeoutExpired):
                state = f"as it has ended with code {self._process.wait(POLL_S)}"
        return self._failed(f"broke off at {path}, {state}")

    @override
    def _failed(self, what: str) -> EngineError:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            lines = [f"(cannot be read: {error.strerror})"]
        end = "\n".join(f"  {line}" for line in lines[-LOG_LINES:])
        return EngineError(f"{self.name} {what}; the end of {self._log}:\n{end}")

    @override
    def close(self) -> None:
        """Stop the server and everything that it has started."""
        self.hang_up()
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
