"""A tool that runs Python for the policy, in a sandbox. Imports no torch."""

from __future__ import annotations

import asyncio
from threading import Lock

from leaderless.base.leftover_processes import exit_in_words
from leaderless.config.rewards import SandboxName
from leaderless.environments.tools import tool
from leaderless.rewards.sandbox.jail import Interpreter
from leaderless.rewards.sandbox.messages import SandboxError, SandboxLimits
from leaderless.rewards.sandbox.sandboxes import choose_sandbox

_LOST = "The interpreter was started anew: variables and files of earlier calls are lost."
_SHOWN_CHARACTERS = 1000
"""Characters that the policy is shown of what a call has printed that was ended."""


class PythonTool:
    """An interpreter for one episode, which keeps variables and files from call to call.

    It has the standard library, and a folder of its own; no network, no other files and programs. A call that crashes,
    hangs or prints too much gets a message, and loses what earlier ones have left behind.

    Args:
        timeout_s: Seconds that a call may take.
        memory_mib: MiB of address space that each process may use.
        max_processes: Processes and threads that a call may start.
        max_files: Files and folders that an episode may create; opening a file to overwrite it counts, too.
        max_file_bytes: Largest size of each file, in bytes.
        max_output_bytes: Bytes that a call may print before it is ended.
        sandbox: Sandbox that it runs in; see `reward.code.sandbox`.

    Raises:
        SandboxError: The sandbox cannot be used on this machine.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_mib: int = 512,
        max_processes: int = 8,
        max_files: int = 200,
        max_file_bytes: int = 2**22,
        max_output_bytes: int = 2**16,
        sandbox: SandboxName = "auto",
    ) -> None:
        try:
            self._sandbox = choose_sandbox(sandbox)
        except RuntimeError as error:
            raise SandboxError(f"the python tool {error}") from error
        self._limits = SandboxLimits(timeout_s, memory_mib, max_processes, max_files, max_file_bytes, max_output_bytes)
        self._interpreter: Interpreter | None = None
        self._is_closed = False
        self._lock = Lock()

    @tool
    def python(self, code: str) -> str:
        """Run Python code, and return what it prints and the value of its last expression.

        Variables and files are kept for later calls. There is only the standard library, and no network.

        Args:
            code: Python code.
        """
        try:
            ended = self._open().call(code)
        except SandboxError:
            self._drop()
            raise
        output = ended.output.rstrip()
        if ended.cause == "answered":
            return output or "(no output)"
        shown = output if len(output) <= _SHOWN_CHARACTERS else f"{output[:_SHOWN_CHARACTERS]} [...]"
        reason = {
            "timeout": f"took more than {self._limits.test_timeout_s:g} s and was ended",
            "output": f"printed more than {self._limits.max_output_bytes:,} bytes and was ended",
            "exited": f"ended the interpreter with {exit_in_words(ended.code)}",
        }[ended.cause]
        return f"{shown}\nError: the call {reason}. {_LOST}".lstrip()

    async def close(self) -> None:
        """End the interpreter and remove its files; it cannot be used any more."""
        with self._lock:
            self._is_closed = True
        if self._interpreter is not None:
            await asyncio.to_thread(self._interpreter.close)

    def _drop(self) -> None:
        """Leave a sandbox that does not work any more, so that the next call starts another one."""
        with self._lock:
            dropped, self._interpreter = self._interpreter, None
        if dropped is not None:
            dropped.close()

    def _open(self) -> Interpreter:
        """The interpreter, started with the first call."""
        with self._lock:  # an episode may be closed while an abandoned call still begins
            if self._is_closed:
                raise RuntimeError("the episode of this interpreter is over")
            if self._interpreter is None:
                self._interpreter = Interpreter(self._sandbox, self._limits)
            return self._interpreter
