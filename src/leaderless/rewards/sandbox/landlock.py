"""Keeps files out of a process's reach with Landlock; https://docs.kernel.org/userspace-api/landlock.html."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from .kernel import call  # relative, for the supervisor runs without the package

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights on files that each version knows; 16 from the fifth on."""
_NET_FROM, _SCOPES_FROM = 4, 6
_ALL_NET, _ALL_SCOPES = 0b11, 0b11
"""Binding and connecting TCP; abstract sockets, and signals to processes outside."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE


def restrict(version: int, folder: str, readable: Iterable[str], listable: Iterable[str]) -> None:
    """Leave this process, for ever, its folder, and what it may read; nothing may be executed, bound or connected to.

    Args:
        version: Version of the kernel's interface, at least 1.
        folder: Folder that may be read and written; neither links nor sockets nor devices can be made there.
        readable: Files and folders with all that is in them; what does not exist is passed over.
        listable: Folders whose names may be listed, at any depth.

    Raises:
        OSError: The kernel refuses.
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
