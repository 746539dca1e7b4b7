"""The built-in sandbox, which asks nothing but the kernel. Imports no torch."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from leaderless.rewards.sandbox.kernel_limits import ask_layers
from leaderless.rewards.sandbox.messages import Setting
from leaderless.rewards.sandbox.protocol import Sandbox

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Files that the interpreter reads besides its own library, wherever it is installed."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders of packages that were installed into the library; no part of what a program has."""


class BuiltinSandbox(Sandbox):
    """Landlock keeps files out of reach, and a filter of system calls everything else."""

    name: ClassVar[str] = "builtin"

    @override
    def command(self, supervisor: Sequence[str], scratch: str) -> Sequence[str]:
        return supervisor  # which may itself do what this process may


def setting_of(scratch: str) -> Setting:
    """Surroundings of programs with all layers that the kernel has."""
    landlock, has_filter, has_listener = ask_layers()
    readable, listable = interpreter_paths()
    return Setting(scratch, readable, listable, landlock, has_filter, has_filter and has_listener)


@cache
def interpreter() -> str:
    """The interpreter itself; a virtual environment's would read its settings, which a program may not."""
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
