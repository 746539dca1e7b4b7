"""Keeps system calls out of a process's reach, and asks the supervisor about those that it counts.

See https://docs.kernel.org/userspace-api/seccomp_filter.html. Only arguments in registers are checked, so a program
cannot change them afterwards; calls that pass them in memory (`clone3`, `openat2`) do not exist for it. Calls without
an entry in the tables are refused, so what a newer kernel adds is refused too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import termios
from collections.abc import Iterable, Mapping

from .kernel_limits import (  # relative, for the supervisor runs without the package
    MACHINES,
    RET_ERRNO,
    RET_USER_NOTIF,
    call,
)


def _table(*groups: str) -> dict[str, tuple[int, int | None]]:
    """Numbers by name, from entries of name, number on x86-64 and number on 64-bit ARM, which lacks some."""
    entries = (entry.split() for group in groups for entry in group.split(", "))
    return {name: (int(x86), None if arm == "-" else int(arm)) for name, x86, arm in entries}


PLAIN = _table(
    # Reading and writing what is open.
    "read 0 63, readv 19 65, pread64 17 67, write 1 64, writev 20 66, pwrite64 18 68, lseek 8 62, fsync 74 82, "
    "fdatasync 75 83, ftruncate 77 46, flock 73 32, close 3 57, sendmsg 46 211",
    # Names, folders and attributes of files.
    "access 21 -, faccessat 269 48, faccessat2 439 439, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, "
    "statx 332 291, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, rename 82 -, renameat 264 38, "
    "renameat2 316 276, rmdir 84 -, unlink 87 -, unlinkat 263 35, chdir 80 49, fchdir 81 50, getcwd 79 17",
    # Descriptors, pipes and waiting for them.
    "dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, "
    "pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19",
    # Memory.
    "brk 12 214, mmap 9 222, mprotect 10 226, mremap 25 216, munmap 11 215, madvise 28 233, membarrier 324 283",
    # Threads, and the end of processes.
    "futex 202 98, set_robust_list 273 99, rseq 334 293, sched_getaffinity 204 123, sched_yield 24 124, exit 60 93, "
    "exit_group 231 94, wait4 61 260, waitid 247 95",
    # Signals and timers.
    "alarm 37 -, pause 34 -, getitimer 36 102, setitimer 38 103, sigaltstack 131 132, restart_syscall 219 128, "
    "rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133, "
    "rt_sigtimedwait 128 137",
    # Time.
    "time 201 -, times 100 153, gettimeofday 96 169, clock_getres 229 114, clock_gettime 228 113, "
    "clock_nanosleep 230 115, nanosleep 35 101",
    # What a process may know of itself and the machine.
    "getpid 39 172, getppid 110 173, gettid 186 178, getpgid 121 155, getpgrp 111 -, getsid 124 156, getuid 102 174, "
    "geteuid 107 175, getresuid 118 148, getgid 104 176, getegid 108 177, getresgid 120 150, getgroups 115 158, "
    "getrlimit 97 163, getrusage 98 165, getrandom 318 278, sysinfo 99 179, uname 63 160",
)
"""Allowed with any arguments."""

BOUND = _table(
    "clone 56 220, clone3 435 435, creat 85 -, fcntl 72 25, fork 57 -, ioctl 16 29, kill 62 129, mkdir 83 -, "
    "mkdirat 258 34, open 2 -, openat 257 56, openat2 437 437, prlimit64 302 261, tgkill 234 131, vfork 58 -",
)
"""Judged by their arguments, or counted."""


_RET_ALLOW = 0x7FFF0000
_RET_KILL_PROCESS = 0x80000000
_LOAD, _AND, _IF_EQUAL, _IF_SET, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTIFICATION_BYTES = 80

_CLONE_FORBIDDEN = 0x7E020000 | 0x8000
"""New namespaces, and children that the supervisor would take for its own (CLONE_PARENT)."""
_O_TMPFILE = 0o20000000
_FCNTL = (*range(8), 1030, 1032)
"""Duplicate, flags, locks, the size of a pipe; not F_SETOWN and F_SETSIG, which send signals to anyone."""
_IOCTL = (termios.TCGETS, termios.FIOCLEX, termios.FIONCLEX, termios.FIONREAD, termios.FIONBIO, termios.TIOCGWINSZ)

PROCESSES = ("clone", "fork", "vfork")
"""Calls that start a process or a thread."""
FILES = ("openat", "open", "creat", "mkdir", "mkdirat")
"""Calls that make a file or a folder."""

_CALLS = PLAIN | BOUND
_Statement = tuple[int, int, int, int]


def number_of(name: str) -> int | None:
    """The number of a system call on this machine; None if it has no such call."""
    return _CALLS[name][MACHINES[platform.machine()][0]]


def install(*, has_listener: bool) -> int | None:
    """Filter the system calls of this process and its children forever; it must have renounced new privileges.

    Calls that start processes and create files ask the owner of the listener, the file descriptor that is returned;
    without one they are refused. Raises an OSError if the kernel refuses, for example because of another listener.
    """
    counted = RET_USER_NOTIF if has_listener else RET_ERRNO | errno.EPERM
    packed = b"".join(struct.pack("=HBBI", *statement) for statement in _make_filter(os.getpid(), counted))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(packed) // 8, ctypes.addressof(buffer))
    flags = _NEW_LISTENER if has_listener else 0
    listener = call(MACHINES[platform.machine()][2], _SET_MODE_FILTER, flags, program)
    return listener if has_listener else None


def _make_filter(own_pid: int, counted: int) -> list[_Statement]:
    refused = RET_ERRNO | errno.EPERM
    unknown = [_answer(RET_ERRNO | errno.ENOSYS)]
    rules = {
        "kill": _if_among(0, [own_pid, 0]),
        "tgkill": _if_among(0, [own_pid]),
        "prlimit64": _if_among(0, [0]),
        "ioctl": _if_among(1, _IOCTL),
        "fcntl": _if_among(1, _FCNTL),
        "openat": _by_bits(2, {_O_TMPFILE: refused, os.O_CREAT: counted}, _RET_ALLOW),
        "open": _by_bits(1, {_O_TMPFILE: refused, os.O_CREAT: counted}, _RET_ALLOW),
        "clone": _by_bits(0, {_CLONE_FORBIDDEN: refused}, counted),
        "clone3": unknown,
        "openat2": unknown,
    }
    rules |= {name: [_answer(counted)] for name in ("fork", "vfork", "creat")}
    # A folder that its owner cannot read could not be removed with its contents.
    whole = [(_AND, 0, 0, 0o700), (_IF_EQUAL, 0, 1, 0o700), _answer(counted), _answer(refused)]
    rules |= {name: [_load(argument), *whole] for name, argument in (("mkdir", 1), ("mkdirat", 2))}
    rules |= {name: [_answer(_RET_ALLOW)] for name in PLAIN}
    statements: list[_Statement] = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 1, 0, MACHINES[platform.machine()][1]),
        _answer(_RET_KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for name, rule in rules.items():
        if (number := number_of(name)) is not None:
            statements += [(_IF_EQUAL, 0, len(rule), number), *rule]
    return [*statements, _answer(refused)]


def _answer(action: int) -> _Statement:
    return (_RETURN, 0, 0, action)


def _load(argument: int) -> _Statement:
    """The lower half of an argument; the kernel uses no more of those that are checked here."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)


def _if_among(argument: int, values: Iterable[int]) -> list[_Statement]:
    tests = [s for value in values for s in ((_IF_EQUAL, 0, 1, value), _answer(_RET_ALLOW))]
    return [_load(argument), *tests, _answer(RET_ERRNO | errno.EPERM)]


def _by_bits(argument: int, actions: Mapping[int, int], otherwise: int) -> list[_Statement]:
    tests = [s for bits, action in actions.items() for s in ((_IF_SET, 0, 1, bits), _answer(action))]
    return [_load(argument), *tests, _answer(otherwise)]


class Counter:
    """Answers a program's filter: grants a number of processes and files, and no more.

    It counts what it has granted, not what exists, so that nothing can be created between counting and granting.
    """

    def __init__(self, max_processes: int, max_files: int) -> None:
        self._max_processes = max_processes
        self._left = {"process": max_processes, "file": max_files}
        self._kinds = {number_of(name): "process" for name in PROCESSES} | {number_of(name): "file" for name in FILES}

    def refill(self) -> None:
        """Grant as many processes as at the beginning, once those that were granted have ended."""
        self._left["process"] = self._max_processes

    def answer(self, listener: int) -> None:
        """Answer one call that waits at the listener, which is ready to be read."""
        notification = bytearray(_NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(listener, _RECEIVE, notification)
            identity, _, _, number = struct.unpack_from("=QIIi", notification)
            kind = self._kinds[number]
            is_granted = self._left[kind] > 0
            self._left[kind] -= is_granted
            error = 0 if is_granted else -(errno.EAGAIN if kind == "process" else errno.EDQUOT)
            fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", identity, 0, error, _CONTINUE if is_granted else 0))
        except FileNotFoundError:
            pass  # The caller was killed while it waited.
