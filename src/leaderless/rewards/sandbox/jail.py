"""The owner's side of the sandbox: starts a supervisor and has it run programs. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

from leaderless.base.values import Json
from leaderless.rewards.sandbox.messages import (
    CallRequest,
    ProgramEnd,
    SandboxError,
    SandboxLimits,
    SandboxOrder,
    ScriptRequest,
    TestRequest,
)
from leaderless.rewards.sandbox.sandboxes import Sandbox, interpreter, setting_of

_FLAGS = ("-P", "-s", "-S", "-B")
"""Like `-I`, which would also ignore the fixed order of sets."""
_START = "import sys; sys.path.append(sys.argv[1]); from sandbox.supervisor import main; sys.path.pop(); main()"


class Jail:
    """A supervisor in a sandbox.

    Its methods raise a `SandboxError` if the sandbox does not work on this machine, but never because of what a program
    does.
    """

    def __init__(
        self, sandbox: Sandbox, program: str, limits: SandboxLimits, kind: Literal["script", "trial", "interpreter"]
    ) -> None:
        self._scratch = tempfile.mkdtemp(prefix="leaderless-program-")
        # Sets have the same order in every process. The interpreter may need the path of libraries to start.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        supervisor = [interpreter(), *_FLAGS, "-c", _START, str(Path(__file__).parents[1])]
        self._supervisor = subprocess.Popen(  # noqa: S603 - this interpreter, with the package's own code
            sandbox.command(supervisor, self._scratch),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0"} | kept,
            cwd=self._scratch,
            start_new_session=True,
        )
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._requests, self._replies = self._supervisor.stdin, self._supervisor.stdout
        order = SandboxOrder(setting=list(setting_of(self._scratch)), limits=list(limits), program=program, kind=kind)  # type: ignore[arg-type]
        self._send(order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the supervisor, and with it whatever it runs."""
        with suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        self._supervisor.wait()
        if Path(self._scratch).exists():  # The supervisor was ended before it could remove it.
            shutil.rmtree(self._scratch)

    def _send(self, message: SandboxOrder | ScriptRequest | TestRequest | CallRequest) -> None:
        # If the supervisor has ended, the next line that is read says why.
        with suppress(BrokenPipeError):
            self._requests.write(json.dumps(message).encode() + b"\n")
            self._requests.flush()

    def _receive(self) -> Sequence[Json] | str:
        line = self._replies.readline()
        if not line:
            raise SandboxError(
                f"the sandbox's supervisor ended with exit code {self._supervisor.wait()}; see its output above"
            )
        message: Sequence[Json] | str | Mapping[str, str] = json.loads(line)
        if isinstance(message, Mapping):
            raise SandboxError(f"the sandbox does not work on this machine: {message['broken']}")
        return message

    def _ended(self) -> ProgramEnd:
        ended = ProgramEnd(*self._receive())  # type: ignore[arg-type]
        return ended._replace(passed=tuple(ended.passed))


class Script(Jail):
    """A program that is run on inputs; each run begins anew, in an empty folder."""

    def __init__(self, sandbox: Sandbox, program: str, limits: SandboxLimits) -> None:
        super().__init__(sandbox, program, limits, "script")

    def run(self, text: str, deadline: float) -> ProgramEnd:
        """Run the program with an input, until a deadline by the monotonic clock."""
        self._send(ScriptRequest(input=text, deadline=deadline))
        return self._ended()


class TestTrial(Jail):
    """A program that is tested once."""

    def __init__(self, sandbox: Sandbox, program: str, limits: SandboxLimits) -> None:
        super().__init__(sandbox, program, limits, "trial")

    def run(self, pieces: Sequence[tuple[str, str]], deadline: float) -> ProgramEnd:
        """Run tests of what the program defines; see `TestRequest`."""
        self._receive()
        self._send(TestRequest(pieces=list(pieces), deadline=deadline))
        return self._ended()


class Interpreter(Jail):
    """An interpreter that executes one piece of code after another, with what earlier ones have left behind."""

    def __init__(self, sandbox: Sandbox, limits: SandboxLimits) -> None:
        super().__init__(sandbox, "", limits, "interpreter")

    def call(self, code: str) -> ProgramEnd:
        """Execute code for at most `test_timeout_s`, and return what it has printed.

        At the end comes the value of the last expression, or what is left of a traceback. Threads rest until the next
        call, and further processes are ended. If the cause is not `answered`, the interpreter was ended, and its
        variables and files are lost: the next call begins anew.
        """
        self._send(CallRequest(code=code))
        return self._ended()
