"""System calls by which the kernel confines a program. Linux on x86-64 or 64-bit ARM only.

Landlock keeps files out of a process's reach; see https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""By machine: the column of the table of system calls, the kernel's name for it, and the number of `seccomp`."""
_SECCOMP_GET_ACTION_AVAIL = 2
RET_ERRNO = 0x00050000
RET_USER_NOTIF = 0x7FC00000

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights on files that each version of Landlock knows; 16 from the fifth on."""
_NET_FROM, _SCOPES_FROM = 4, 6
_ALL_NET, _ALL_SCOPES = 0b11, 0b11
"""Binding and connecting TCP; abstract sockets, and signals to processes outside."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Layers(NamedTuple):
    """Layers of the sandbox that this kernel has.

    Attributes:
        landlock: Version of its interface; 0 where there is none.
        has_filter: Whether system calls can be filtered.
        has_listener: Whether a filter can ask another process, which counts what the program creates.
    """

    landlock: int
    has_filter: bool
    has_listener: bool

    def missing(self) -> tuple[str, ...]:
        """The missing layers, each with its purpose and origin."""
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

    def ask(number: int, *arguments: object) -> int | None:
        try:
            return call(number, *arguments)
        except OSError:
            return None

    def knows(action: int) -> bool:
        seccomp = MACHINES[platform.machine()][2]
        return ask(seccomp, _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(action))) is not None

    return Layers(ask(_CREATE_RULESET, None, 0, _LANDLOCK_VERSION) or 0, knows(RET_ERRNO), knows(RET_USER_NOTIF))


def call(number: int, *arguments: object) -> int:
    """Make a system call for which the standard library has no function, with numbers, buffers and pointers.

    Returns the kernel's result, at least 0; raises an OSError if the call fails.
    """
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def control(option: int, value: int) -> None:
    """Set an attribute of this process (`prctl`); raises an OSError if the kernel refuses."""
    words = [ctypes.c_ulong(word) for word in (value, 0, 0, 0)]
    if _libc.prctl(ctypes.c_int(option), *words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")


def restrict_files(version: int, folder: str, readable: Iterable[str], listable: Iterable[str]) -> None:
    """Leave this process only its folder and some files to read, forever; it can execute, bind and connect nothing.

    Args:
        version: Version of the kernel's Landlock, at least 1.
        folder: Folder that may be read and written; links, sockets and devices cannot be made there.
        readable: Files and folders with their contents; those that do not exist are left out.
        listable: Folders whose names may be listed, at any depth.
    """
    handled = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", handled, _ALL_NET, _ALL_SCOPES)
    size = 24 if version >= _SCOPES_FROM else 16 if version >= _NET_FROM else 8
    ruleset = call(_CREATE_RULESET, attributes, size, 0)
    own = _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
    _allow(ruleset, folder, own & handled)
    _allow(ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    for path in readable:
        _allow(ruleset, path, _READ_FILE | _READ_DIR)
    for path in listable:
        _allow(ruleset, path, _READ_DIR)
    call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        is_folder = os.fstat(place).st_mode & 0o170000 == 0o040000
        wanted = rights if is_folder else rights & _OF_FILES
        call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", wanted, place), 0)
    finally:
        os.close(place)
