"""A process that gives up everything but what a program needs, and then runs the program, or code piece by piece."""

from __future__ import annotations

import ast
import atexit
import ctypes
import linecache
import math
import os
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType

from . import kernel_limits, seccomp  # relative, for the supervisor runs without the package
from .messages import SandboxLimits, Setting

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_VERSION = 0x20080522
_MAX_OPEN_FILES = 64
_MAX_MESSAGE_BYTES = 4096
_START_TIMEOUT_S = 30.0
"""Seconds that a process may take to confine itself, even on a busy machine."""
_FILE_NAME = "program.py"


class Confined:
    """A confined process, forked from the supervisor and seen by it.

    Args:
        run: Function that it calls once it is confined; it must not return.
        setting: Folder and layers that it runs with.
        limits: Limits of what it may use.
        stdin: File descriptor of its standard input; not closed here.
        kept: Further file descriptors that it keeps.
        cpu_s: Seconds of processor time after which it ends even if nobody watches it; None for the limit of one run.

    Attributes:
        pid: Number of the process, and of its process group.
        listener: File descriptor on which its filter asks, and `counter` answers; None without.
        outputs: Bytes that it printed so far, by the file descriptors to read from: standard output first.

    Raises:
        RuntimeError: It could not be confined, and has run nothing.
    """

    def __init__(
        self,
        run: Callable[[], None],
        setting: Setting,
        limits: SandboxLimits,
        stdin: int,
        kept: Sequence[int] = (),
        cpu_s: int | None = None,
    ) -> None:
        self._folder = f"{setting.scratch}/{os.urandom(8).hex()}"
        os.mkdir(self._folder, 0o700)  # noqa: PTH102 - pathlib is slow to import
        here, there = socket.socketpair()
        output, output_end = os.pipe()
        errors, errors_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _take_over((stdin, output_end, errors_end), (there.fileno(), *kept))
                _give_up(self._folder, setting, limits, there, cpu_s or math.ceil(limits.test_timeout_s) + 1)
                run()
            except BaseException as error:  # noqa: BLE001 - the boundary of a process that must not return
                _report(there, f"{type(error).__name__}: {error}")
            finally:
                os._exit(1)
        for end in (output_end, errors_end):
            os.close(end)
        there.close()
        self.counter = seccomp.Counter(limits.max_processes, limits.max_files)
        self.outputs: Mapping[int, bytearray] = {output: bytearray(), errors: bytearray()}
        with here:
            self.listener = _await(here)

    def close(self) -> None:
        """Close its file descriptors and remove its folder, after it has ended."""
        for fd in (*self.outputs, *([] if self.listener is None else [self.listener])):
            os.close(fd)
        remove(self._folder)


def remove(folder: str) -> None:
    """Remove a folder that is no longer used, with its contents."""
    try:
        os.rmdir(folder)  # noqa: PTH106 - pathlib is slow to import
    except OSError:
        import shutil  # Slow to import, and few programs leave files behind.

        shutil.rmtree(folder)


def run_as_script(source: str) -> None:
    """Run a program as `python program.py` would, and end this process with its exit code."""
    sys.argv = [_FILE_NAME]
    code = 0
    try:
        execute(source, "__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the boundary of the program: reported as an interpreter does
        traceback.print_exc()
        code = 1
    finally:
        _leave(code)


def execute(source: str, name: str) -> ModuleType:
    """Execute a program as a module of this interpreter; the module has the names that the program defined."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, _FILE_NAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - confined, for this
    return module


def _leave(code: int) -> None:
    """End this process as an interpreter ends, but without the supervisor's clean-up, with which it was forked."""
    try:
        if "threading" in sys.modules:
            threading = sys.modules["threading"]
            for thread in threading.enumerate():
                if thread is not threading.main_thread() and not thread.daemon:
                    thread.join()
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no other way to call them
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _await(here: socket.socket) -> int | None:
    """Wait until the process is confined, and receive its listener."""
    here.settimeout(_START_TIMEOUT_S)
    message, listeners, _, _ = socket.recv_fds(here, _MAX_MESSAGE_BYTES, 1)
    if message != b"confined":
        raise RuntimeError(f"a program cannot be confined: {message.decode(errors='replace') or 'its process ended'}")
    return listeners[0] if listeners else None


def _report(there: socket.socket, problem: str) -> None:
    # Once it is confined, the supervisor no longer listens; it learns of the failure from the exit code.
    with suppress(OSError):
        there.send(problem.encode()[:_MAX_MESSAGE_BYTES])


def _take_over(streams: Sequence[int], kept: Sequence[int]) -> None:
    """Make these the standard streams, and close the supervisor's files."""
    for target, source in enumerate(streams):
        os.dup2(source, target)
    last = 2
    for fd in sorted(kept):
        os.closerange(last + 1, fd)
        last = fd
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - stays open
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _give_up(folder: str, setting: Setting, limits: SandboxLimits, there: socket.socket, cpu_s: int) -> None:
    """Give up everything that a program must not have, and report that to the supervisor."""
    os.setsid()
    kernel_limits.control(_PR_SET_PDEATHSIG, _SIGKILL)
    # No core dump, and no access to its files in /proc for other programs of the user.
    kernel_limits.control(_PR_SET_DUMPABLE, 0)
    kernel_limits.control(_PR_SET_NO_NEW_PRIVS, 1)
    os.chdir(folder)
    os.environ.clear()
    os.umask(0o077)
    if setting.landlock:
        kernel_limits.restrict_files(setting.landlock, folder, setting.readable, setting.listable)
    # The rights of root would override the limits below.
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    kernel_limits.call(_CAPSET[os.uname().machine], ctypes.create_string_buffer(header), bytes(24))
    for name, most in {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: limits.memory_mib * 2**20,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }.items():
        resource.setrlimit(name, (most, most))
    listener = seccomp.install(has_listener=setting.has_listener) if setting.has_filter else None
    with there:
        socket.send_fds(there, [b"confined"], [] if listener is None else [listener])
    if listener is not None:
        os.close(listener)


_CALL_NAME = "<call {}>"


def interpret(asks: int, code: int, replies: int) -> None:
    """Execute code whenever asked, until the asking end is closed.

    Args:
        asks: File descriptor on which one byte asks for one call.
        code: File descriptor of a file that holds the code of the call.
        replies: File descriptor that gets one byte when the call has ended.
    """
    own, number = os.getpid(), 0
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    while os.read(asks, 1):
        number += 1
        # The code before may have closed or replaced them.
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        output = sys.stdout
        source = os.pread(code, os.fstat(code).st_size, 0).decode()
        _execute(source, vars(module), _CALL_NAME.format(number))
        if not output.closed:
            output.flush()
        if os.getpid() != own:
            os._exit(0)  # a process that the code has started, and that has come to the end of the code
        os.write(replies, b".")


def _execute(source: str, names: dict[str, object], file: str) -> None:
    """Execute code, and print the value of its last expression, or the error."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        tree = ast.parse(source, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file, "exec", dont_inherit=True), names)  # noqa: S102 - confined, for this
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval", dont_inherit=True), names)  # noqa: S307
            if value is not None:
                names["_"] = value
                print(repr(value))  # noqa: T201 - what an interpreter does
    except BaseException as error:  # noqa: BLE001 - the boundary of the code: told as an interpreter does
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<call "):
            frames = frames.tb_next  # what is shown begins in the code
        print("".join(traceback.format_exception(type(error), error, frames)), end="")  # noqa: T201
