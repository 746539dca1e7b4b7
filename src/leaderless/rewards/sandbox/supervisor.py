"""Starts, watches and ends confined processes for one owner, in a small interpreter of its own. Imports no torch.

It reads one JSON value per line from its owner and answers each with one line. What could help a program to cheat
arrives only after the program was forked: each input with its own run, tests once the program's process runs, expected
outputs never.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from . import kernel_limits  # relative, for the supervisor runs without the package
from .confined import Confined, interpret, remove, run_as_script
from .messages import CallRequest, ProgramEnd, SandboxLimits, SandboxOrder, ScriptRequest, Setting, TestRequest
from .remote import judge, serve

_PR_SET_CHILD_SUBREAPER = 36
_END_TIMEOUT_S = 10.0
"""Seconds that killed processes may take to disappear."""
_READ_BYTES = 65536
_INTERPRETER_CPU_S = 3600
"""Seconds of processor time of an interpreter, over all of its calls; each of them is also watched by the clock."""
_OWNER = 0
"""File descriptor of what the owner writes; when it is closed, the owner has ended."""


def main() -> None:
    """Serve the owner until it closes the pipe."""
    # Processes that a program leaves behind become children of this process, not of the system.
    kernel_limits.control(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        _serve_owner()
    except EOFError:
        return
    except (OSError, RuntimeError) as error:
        _send({"broken": f"{type(error).__name__}: {error}"})


def _serve_owner() -> None:
    order: SandboxOrder = json.loads(_read_line())
    source = order["program"]
    setting, limits = Setting(*order["setting"]), SandboxLimits(*order["limits"])  # type: ignore[arg-type]
    try:
        if order["kind"] == "trial":
            _send(_run_tests(source, setting, limits))
        elif order["kind"] == "interpreter":
            _serve_calls(setting, limits)
        while True:
            request: ScriptRequest = json.loads(_read_line())
            _send(_run_input(source, request, setting, limits))
    finally:
        with suppress(OSError):  # In bubblewrap it is a mount, which its owner can remove.
            remove(setting.scratch)


def _run_input(source: str, request: ScriptRequest, setting: Setting, limits: SandboxLimits) -> ProgramEnd:
    """Run a program once, as a script."""
    stdin = os.memfd_create("input")
    with open(stdin, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(request["input"].encode())
        file.seek(0)
        main = Confined(lambda: run_as_script(source), setting, limits, stdin)
    watch = _Watch([main], limits, request["deadline"])
    cause = watch.until_ended(main)
    codes = watch.end()
    output = bytes(next(iter(main.outputs.values())))
    return ProgramEnd("output" if watch.is_too_long() else cause, codes[main.pid], output.decode(errors="replace"))


def _run_tests(source: str, setting: Setting, limits: SandboxLimits) -> ProgramEnd:
    """Run a program in one process, and the tests, which the owner sends only now, in another."""
    requests, requests_end = os.pipe()
    replies, replies_end = os.pipe()
    with open(os.devnull) as nothing:  # noqa: PTH123 - pathlib is slow to import
        stdin = nothing.fileno()
        program = Confined(
            lambda: serve(source, requests, replies_end), setting, limits, stdin, (requests, replies_end)
        )
        _send("started")
        trial: TestRequest = json.loads(_read_line())
        report, report_end = os.pipe()
        tests = Confined(
            lambda: judge(trial["pieces"], replies, requests_end, report_end),
            setting,
            limits._replace(max_processes=0, max_files=0),  # the tests start nothing and write nothing
            stdin,
            (replies, requests_end, report_end),
        )
    for fd in (requests, requests_end, replies, replies_end, report_end):
        os.close(fd)
    watch = _Watch([program, tests], limits, trial["deadline"], report)
    cause = watch.until_ended(tests)
    watch.end()
    verdicts = [json.loads(line) for line in bytes(watch.report).splitlines(keepends=True) if line.endswith(b"\n")]
    unfit = next((verdict for verdict in verdicts if isinstance(verdict, str)), "")
    return ProgramEnd(cause, 0, "", tuple(verdict for verdict in verdicts if isinstance(verdict, bool)), unfit)


def _serve_calls(setting: Setting, limits: SandboxLimits) -> None:
    """Answer calls of an interpreter, and start it anew after one that it does not survive."""
    running: _Running | None = None
    while True:
        try:
            request: CallRequest = json.loads(_read_line())
        except EOFError:
            if running is not None:
                running.end()
            raise
        running = _Running(setting, limits) if running is None else running
        ended = running.call(request)
        if ended.cause != "answered":
            running = None
        _send(ended)


class _Running:
    """An interpreter that waits for calls."""

    def __init__(self, setting: Setting, limits: SandboxLimits) -> None:
        self._limits = limits
        asks, self._ask = os.pipe()
        replies, replies_end = os.pipe()
        # The code is not sent through a pipe: a program that reads nothing could then block its supervisor.
        self._code = os.memfd_create("code")
        kept = (asks, self._code, replies_end)
        with open(os.devnull) as nothing:  # noqa: PTH123 - pathlib is slow to import
            self._process = Confined(
                lambda: interpret(*kept), setting, limits, nothing.fileno(), kept, cpu_s=_INTERPRETER_CPU_S
            )
        os.close(asks)
        os.close(replies_end)
        self._watch = _Watch([self._process], limits, math.inf, replies)

    def call(self, request: CallRequest) -> ProgramEnd:
        """Execute code; unless the cause is `answered`, this was the last call."""
        os.ftruncate(self._code, 0)
        os.pwrite(self._code, request["code"].encode(errors="backslashreplace"), 0)
        self._process.counter.refill()
        self._watch.begin(time.monotonic() + self._limits.test_timeout_s)
        os.killpg(self._process.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):
            os.write(self._ask, b".")
        cause = self._watch.until_ended(self._process, of_call=True)
        if cause == "answered":
            self._rest()
        if self._watch.is_too_long():
            cause = "output"
        code = 0 if cause == "answered" else self.end()
        output = bytes(next(iter(self._process.outputs.values())))
        return ProgramEnd(cause, code, output.decode(errors="replace"))

    def end(self) -> int:
        """End the interpreter and all that it has started; returns its exit code."""
        codes = self._watch.end()
        for fd in (self._ask, self._code):
            os.close(fd)
        return codes[self._process.pid]

    def _rest(self) -> None:
        """Stop the interpreter with its threads, read what it has printed, and kill what it has started."""
        # Who cannot create processes cannot escape: such calls wait, as nobody grants them now.
        os.killpg(self._process.pid, signal.SIGSTOP)
        self._watch.drain()
        # Those whose parent has ended have become children of this process.
        waiting = [pid for parent in (os.getpid(), self._process.pid) for pid in _children(parent)]
        while waiting:
            pid = waiting.pop()
            if pid != self._process.pid:
                waiting += _children(pid)
                _kill(os.kill, pid)


class _Watch:
    """Watches confined processes, answers for their filters, and ends them all.

    Args:
        processes: Processes that were just started.
        limits: Limits of each process.
        deadline: End of the run at the latest, by the monotonic clock.
        report: File descriptor on which tests or calls report; each report begins the time of the next test.

    Attributes:
        report: Reports of the tests or calls, as bytes.
    """

    def __init__(
        self, processes: Sequence[Confined], limits: SandboxLimits, deadline: float, report: int | None = None
    ) -> None:
        self._processes, self._limits = processes, limits
        self.report = bytearray()
        self._ended = {os.pidfd_open(process.pid): process for process in processes}
        self._buffers: dict[int, bytearray] = {fd: text for p in processes for fd, text in p.outputs.items()}
        self._report = report
        if report is not None:
            self._buffers[report] = self.report
        self._listeners = {p.listener: p for p in processes if p.listener is not None}
        self._open = {_OWNER, *self._ended, *self._buffers, *self._listeners}
        self.begin(deadline)

    def begin(self, deadline: float) -> None:
        """Begin a run or a call, which has printed nothing yet."""
        self._last = deadline
        self._begin_test()
        for buffer in self._buffers.values():
            buffer.clear()

    def _begin_test(self) -> None:
        self._deadline = min(self._last, time.monotonic() + self._limits.test_timeout_s)

    def drain(self) -> None:
        """Read what has been printed by now, as far as it is allowed."""
        while not self.is_too_long() and self._serve(0, self._open & self._buffers.keys()):
            pass

    def until_ended(self, process: Confined, *, of_call: bool = False) -> str:
        """Watch until a process, or its call, has ended, or a limit is reached; the result is a `ProgramEnd.cause`.

        Other processes that it started may still run.
        """
        while process in [self._ended[fd] for fd in self._open if fd in self._ended]:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return "timeout"
            self._serve(left_s)
            if self.is_too_long():
                return "output"
            if of_call and self.report:
                return "answered"
        return "exited"

    def is_too_long(self) -> bool:
        """Whether a process has printed more than it may."""
        texts = [text for process in self._processes for text in process.outputs.values()]
        return any(len(text) > self._limits.max_output_bytes for text in texts)

    def end(self) -> Mapping[int, int]:
        """Kill all remaining processes, read what was printed, and remove all files; returns exit codes by process."""
        for process in self._processes:
            # One call for the whole group, which no process can leave: so none can start another in the meantime.
            _kill(os.killpg, process.pid)
        codes: dict[int, int] = {}
        deadline = time.monotonic() + _END_TIMEOUT_S
        while children := _children(os.getpid()):
            for pid in children:
                _kill(os.kill, pid)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise RuntimeError(f"processes {children} of a program do not end within {_END_TIMEOUT_S:g} s")
            else:
                time.sleep(0.001)
        self._open -= {_OWNER, *self._listeners, *self._ended}
        while self._open:
            self._serve(0)
        for fd in (*self._ended, *([] if self._report is None else [self._report])):
            os.close(fd)
        for process in self._processes:
            process.close()
        return codes

    def _serve(self, timeout_s: float, fds: Collection[int] | None = None) -> bool:
        """Read whatever is there, after waiting for it for at most that long; false if nothing is.

        It is read from all file descriptors, or from some.
        """
        poll = select.poll()
        for fd in self._open if fds is None else fds:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(max(1, 1000 * timeout_s))
        for fd, event in ready:
            if fd == _OWNER:
                self._open -= {fd}
                self.end()
                raise EOFError
            if fd in self._listeners:
                if event & select.POLLIN:
                    self._listeners[fd].counter.answer(fd)
                else:
                    self._open -= {fd}
            elif fd in self._ended or not self._read(fd):
                self._open -= {fd}
        return bool(ready)

    def _read(self, fd: int) -> bool:
        """Read from a pipe; false at its end."""
        data = os.read(fd, _READ_BYTES)
        buffer = self._buffers[fd]
        if fd == self._report:
            self._begin_test()
            buffer += data
        else:
            buffer += data[: self._limits.max_output_bytes + 1 - len(buffer)]
        return bool(data)


def _kill(how: Callable[[int, int], None], pid: int) -> None:
    with suppress(ProcessLookupError):
        how(pid, signal.SIGKILL)


def _children(parent: int) -> list[int]:
    """Processes for which a process has to wait: those its threads started, and those that they left behind."""
    pids: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it, or one of its threads, has ended
        for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208 - pathlib is slow to import
            with open(f"/proc/{parent}/task/{thread}/children") as file:  # noqa: PTH123
                pids += map(int, file.read().split())
    return pids


def _read_line() -> bytes:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line


def _send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
