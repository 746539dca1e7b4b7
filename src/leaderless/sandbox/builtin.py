"""The built-in sandbox, which asks nothing but the kernel. Imports no torch."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from leaderless.sandbox.kernel import ask_layers, is_supported
from leaderless.sandbox.messages import Setting

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Files that the interpreter reads besides its own library, wherever it is installed."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders of packages that were installed into the library; no part of what a program has."""
_WEAKER = "use a newer kernel, or run with less and set allow_weaker=true, at your own risk"


class BuiltinSandbox:
    """See `Sandbox`. Landlock keeps files out of reach, and a filter of system calls everything else."""

    name: ClassVar[str] = "builtin"

    def refusal(self, *, allow_weaker: bool) -> str | None:
        """See `Sandbox`."""
        if problem := refused_system():
            return problem
        missing = ask_layers().missing()
        return None if allow_weaker or not missing else refused_layers(missing)

    def setting(self, scratch: str) -> Setting:
        """See `Sandbox`."""
        return setting_of(scratch)

    def command(self, supervisor: Sequence[str], setting: Setting) -> Sequence[str]:  # noqa: ARG002
        """See `Sandbox`. The supervisor itself may do what this process may."""
        return supervisor


def refused_system() -> str | None:
    """Why programs cannot be confined on this system at all; None if they can."""
    if is_supported():
        return None
    system = os.uname()
    return f"runs programs on Linux on x86-64 and 64-bit ARM only, and this is {system.sysname} on {system.machine}"


def refused_layers(missing: Sequence[str]) -> str:
    """Why layers that the kernel lacks are a reason not to run programs."""
    return f"cannot run programs safely: no {'; no '.join(missing)}; {_WEAKER}"


def setting_of(scratch: str) -> Setting:
    """Surroundings of programs with all layers that the kernel has."""
    landlock, has_filter, has_listener = ask_layers()
    readable, listable = interpreter_paths()
    return Setting(scratch, readable, listable, landlock, has_filter, has_filter and has_listener)


@cache
def interpreter() -> str:
    """The interpreter itself; that of a virtual environment would read its settings, which a program may not."""
    return str(Path(sys.executable).resolve())


@cache
def interpreter_paths() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths that a program may read and list: the standard library without packages installed into it."""
    own = [entry for library in libraries() for entry in library.iterdir() if entry.name not in PACKAGES]
    return (*system_paths(), *sorted(map(str, own))), tuple(sorted(map(str, libraries())))


@cache
def libraries() -> frozenset[Path]:
    """Folders of the standard library."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    return frozenset(Path(sysconfig.get_path(name, vars=base)) for name in ("stdlib", "platstdlib"))


@cache
def system_paths() -> tuple[str, ...]:
    """Paths that the interpreter reads besides the standard library."""
    return (*_SYSTEM, *sorted(map(str, Path(sys.base_prefix, "lib").glob("*.so*"))))
