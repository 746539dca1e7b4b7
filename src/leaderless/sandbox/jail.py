"""The grader's side of the sandbox: starts a supervisor for a program and has it run. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from leaderless.config import Json
from leaderless.sandbox.kernel import ask_layers, is_supported
from leaderless.sandbox.messages import Ended, Limits, Order, ScriptRequest, Setting, TestRequest

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Files that the interpreter reads besides its own library, wherever it is installed."""
_FLAGS = ("-P", "-s", "-S", "-B")
"""Like `-I`, which would also ignore the fixed order of sets."""
_START = "import sys; sys.path.append(sys.argv[1]); from sandbox.supervisor import main; sys.path.pop(); main()"
_WEAKER = "use a newer kernel, or run with less and set reward.code.allow_weaker=true, at your own risk"


def refusal(*, allow_weaker: bool) -> str | None:
    """Why programs cannot be run safely on this machine; None if they can, or the user accepts a missing layer."""
    if not is_supported():
        system = os.uname()
        return f"runs programs on Linux on x86-64 and 64-bit ARM only, and this is {system.sysname} on {system.machine}"
    missing = ask_layers().missing()
    return None if allow_weaker or not missing else f"cannot run programs safely: no {'; no '.join(missing)}; {_WEAKER}"


class Jail:
    """One program, and a supervisor that runs it; each run begins anew, in an empty folder.

    With tests, it is run once, by `run_tests`; else any number of times, by `run_input`. They raise a RuntimeError if
    the sandbox does not work on this machine, but never because of what a program does.
    """

    def __init__(self, program: str, limits: Limits, *, has_tests: bool) -> None:
        landlock, has_filter, has_listener = ask_layers()
        readable, listable = _interpreter_paths()
        self._scratch = tempfile.mkdtemp(prefix="leaderless-program-")
        setting = Setting(self._scratch, readable, listable, landlock, has_filter, has_filter and has_listener)
        # Sets have the same order in every process. The interpreter may need the path of libraries to start.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self._supervisor = subprocess.Popen(  # noqa: S603 - this interpreter, with the package's own code
            [_interpreter(), *_FLAGS, "-c", _START, str(Path(__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"} | kept,
            cwd=self._scratch,
            start_new_session=True,
        )
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._requests, self._replies = self._supervisor.stdin, self._supervisor.stdout
        order = Order(setting=list(setting), limits=list(limits), program=program, has_tests=has_tests)  # type: ignore[arg-type]
        self._send(order)

    def run_input(self, text: str, deadline: float) -> Ended:
        """Run the program as a script with an input, until a deadline by the monotonic clock."""
        self._send(ScriptRequest(input=text, deadline=deadline))
        return self._ended()

    def run_tests(self, pieces: Sequence[tuple[str, str]], deadline: float) -> Ended:
        """Run tests of what the program defines; see `TestRequest`."""
        self._receive()
        self._send(TestRequest(pieces=list(pieces), deadline=deadline))
        return self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the supervisor, and with it whatever it runs."""
        with suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        self._supervisor.wait()
        if Path(self._scratch).exists():  # The supervisor was ended before it could remove it.
            shutil.rmtree(self._scratch)

    def _send(self, message: Order | ScriptRequest | TestRequest) -> None:
        # If the supervisor has ended, the next line that is read says why.
        with suppress(BrokenPipeError):
            self._requests.write(json.dumps(message).encode() + b"\n")
            self._requests.flush()

    def _receive(self) -> Sequence[Json] | str:
        line = self._replies.readline()
        if not line:
            raise RuntimeError(
                f"the sandbox's supervisor ended with exit code {self._supervisor.wait()}; see its output above"
            )
        message: Sequence[Json] | str | Mapping[str, str] = json.loads(line)
        if isinstance(message, Mapping):
            raise RuntimeError(f"the sandbox does not work on this machine: {message['broken']}")
        return message

    def _ended(self) -> Ended:
        ended = Ended(*self._receive())  # type: ignore[arg-type]
        return ended._replace(passed=tuple(ended.passed))


@cache
def _interpreter() -> str:
    """The interpreter itself; that of a virtual environment would read its settings, which a program may not."""
    return str(Path(sys.executable).resolve())


@cache
def _interpreter_paths() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths that a program may read and list: the standard library without packages installed into it."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    libraries = {Path(sysconfig.get_path(name, vars=base)) for name in ("stdlib", "platstdlib")}
    packages = {"site-packages", "dist-packages"}
    own = [entry for library in libraries for entry in library.iterdir() if entry.name not in packages]
    shared = Path(sys.base_prefix, "lib").glob("*.so*")
    return (*_SYSTEM, *sorted(map(str, (*own, *shared)))), tuple(sorted(map(str, libraries)))
