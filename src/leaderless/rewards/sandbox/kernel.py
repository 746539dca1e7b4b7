"""What the kernel offers to confine a program, asked with its own system calls. Linux on x86-64 or 64-bit ARM only."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import NamedTuple

MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""By machine: the column of the table of system calls, the kernel's name for it, and the number of `seccomp`."""
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_VERSION = 1
_SECCOMP_GET_ACTION_AVAIL = 2
RET_ERRNO = 0x00050000
RET_USER_NOTIF = 0x7FC00000


class Layers(NamedTuple):
    """What there is of each layer of the sandbox.

    Attributes:
        landlock: Version of its interface; 0 where there is none.
        has_filter: Whether system calls can be filtered.
        has_listener: Whether a filter can ask a process outside, which counts what the program creates.
    """

    landlock: int
    has_filter: bool
    has_listener: bool

    def missing(self) -> tuple[str, ...]:
        """The layers that are not there, each with what it is for and where it comes from."""
        names = {
            "Landlock, which keeps files out of reach (Linux 5.13, in the `lsm=` list of the boot line)": self.landlock,
            "seccomp filters, which keep system calls out of reach (CONFIG_SECCOMP_FILTER)": self.has_filter,
            "seccomp notifications, which count processes and files (Linux 5.5)": self.has_listener,
        }
        return tuple(name for name, is_there in names.items() if not is_there)


def is_supported() -> bool:
    """Whether this is a system that programs can be confined on at all."""
    return sys.platform == "linux" and platform.machine() in MACHINES and sys.maxsize > 2**32


def ask_layers() -> Layers:
    """Ask the kernel; only where `is_supported`."""
    number = MACHINES[platform.machine()][2]

    def knows(action: int) -> bool:
        return succeeds(number, _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(action)))

    try:
        landlock = call(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    except OSError:
        landlock = 0
    return Layers(landlock, knows(RET_ERRNO), knows(RET_USER_NOTIF))


_Argument = int | bytes | None | ctypes.Array[ctypes.c_char] | object
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(number: int, *arguments: _Argument) -> int:
    """Make a system call that the standard library has no function for.

    Args:
        number: Number of the call on this machine.
        arguments: Numbers, buffers and pointers.

    Returns:
        What the kernel returns, at least 0.

    Raises:
        OSError: The call failed.
    """
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def succeeds(number: int, *arguments: _Argument) -> bool:
    """Whether a system call can be made.

    Args:
        number: Number of the call on this machine.
        arguments: Arguments as for `call`.
    """
    try:
        call(number, *arguments)
    except OSError:
        return False
    return True


def control(option: int, value: int) -> None:
    """Set an attribute of this process (`prctl`).

    Args:
        option: Number of the attribute.
        value: Value to set.

    Raises:
        OSError: The kernel refuses.
    """
    words = [ctypes.c_ulong(word) for word in (value, 0, 0, 0)]
    if _libc.prctl(ctypes.c_int(option), *words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")
