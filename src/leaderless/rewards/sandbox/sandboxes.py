"""Sandboxes, which enclose the supervisor that runs programs. Imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from leaderless.config.rewards import SandboxName
from leaderless.rewards.sandbox.kernel_limits import Layers, ask_layers, is_supported
from leaderless.rewards.sandbox.messages import Setting

_WEAKER = "use a newer kernel, or run with less and set allow_weaker=true, at your own risk"
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Files that the interpreter reads besides its own library, wherever it is installed."""
PACKAGES = ("site-packages", "dist-packages")
"""Folders of packages that were installed into the library; no part of what a program has."""
_PROBE_TIMEOUT_S = 30.0
_BARE = ("--unshare-all", "--new-session", "--clearenv", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev")
"""Namespaces of its own for processes, network, files and the rest, without rights."""


class Sandbox:
    """Keeps programs that nobody has read away from everything else, with nothing but what the kernel has.

    Programs are run by a supervisor, a process that starts, limits, watches and ends them: see `Script` for one that is
    run on inputs, `TestTrial` for one that is tested, and `Interpreter` for one that is continued. A program gets a
    folder of its own, which is removed afterwards, and limits of memory, time, processes, files and output. It reaches
    no other file or process, and no network: Landlock keeps files out of reach, and a filter of system calls all else.
    """

    name: ClassVar[str] = "builtin"

    def refusal(self, *, allow_weaker: bool) -> str | None:
        """Why it cannot be used on this machine, and the remedy; None if it can.

        The user may accept that the kernel lacks a layer.
        """
        if not is_supported():
            system = os.uname()
            machine = f"{system.sysname} on {system.machine}"
            return f"runs programs on Linux on x86-64 and 64-bit ARM only, and this is {machine}"
        if problem := self.lacks():
            return problem
        missing = self.layers().missing()
        if allow_weaker or not missing:
            return None
        return f"cannot run programs safely: no {'; no '.join(missing)}; {_WEAKER}"

    def lacks(self) -> str | None:
        """Missing requirement of this sandbox on this machine, besides the kernel."""
        return None

    def layers(self) -> Layers:
        """Layers of protection that programs have."""
        return ask_layers()

    def command(self, supervisor: Sequence[str], scratch: str) -> Sequence[str]:  # noqa: ARG002
        """The command line that starts the supervisor inside, given the one that starts it outside, and its folder."""
        return supervisor  # which may itself do what this process may


class BubblewrapSandbox(Sandbox):
    """The supervisor runs in namespaces, where only the interpreter and its scratch folder exist.

    All layers of the built-in sandbox that the kernel has are there as well. Landlock may be missing: what it keeps out
    of reach does not exist here.
    """

    name: ClassVar[str] = "bubblewrap"

    @override
    def lacks(self) -> str | None:
        problem = bubblewrap_refusal()
        return problem and f"{problem}, or choose sandbox=builtin"

    @override
    def layers(self) -> Layers:
        return super().layers()._replace(landlock=1)

    @override
    def command(self, supervisor: Sequence[str], scratch: str) -> Sequence[str]:
        return [*_enclosure(), *_around(scratch), *supervisor]


def setting_of(scratch: str) -> Setting:
    """Surroundings of programs with all layers that the kernel has."""
    landlock, has_filter, has_listener = ask_layers()
    readable, listable = interpreter_paths()
    return Setting(scratch, readable, listable, landlock, has_filter, has_filter and has_listener)


def interpreter() -> str:
    """The interpreter itself; a virtual environment's would read its settings, which a program may not."""
    return str(Path(sys.executable).resolve())


@cache
def interpreter_paths() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths that a program may read and list: the standard library without packages installed into it."""
    own = [entry for library in libraries() for entry in library.iterdir() if entry.name not in PACKAGES]
    return (*system_paths(), *sorted(map(str, own))), tuple(sorted(map(str, libraries())))


def libraries() -> frozenset[Path]:
    """Folders of the standard library."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    return frozenset(Path(sysconfig.get_path(name, vars=base)) for name in ("stdlib", "platstdlib"))


def system_paths() -> tuple[str, ...]:
    """Paths that the interpreter reads besides the standard library."""
    return (*_SYSTEM, *sorted(map(str, Path(sys.base_prefix, "lib").glob("*.so*"))))


def find_bubblewrap() -> str | None:
    """The program, if it is installed."""
    return shutil.which("bwrap")


@cache
def _enclosure() -> tuple[str, ...]:
    """The beginning of the command line: everything but the scratch folder."""
    found = find_bubblewrap()
    assert found is not None, "it was asked whether it is installed"
    own = str(Path(__file__).parent)
    paths = dict.fromkeys((*system_paths(), *sorted(map(str, libraries())), interpreter(), own))
    shown = [part for path in paths for part in ("--ro-bind-try", path, path)]
    folders = sorted(str(library / name) for library in libraries() for name in PACKAGES if (library / name).is_dir())
    hidden = [part for path in folders for part in ("--tmpfs", path, "--remount-ro", path)]
    return found, *_BARE, *shown, *hidden


def _around(folder: str) -> tuple[str, ...]:
    """The end of the command line: nothing can be written but in a folder."""
    return "--bind", folder, folder, "--chdir", folder, "--remount-ro", "/dev", "--remount-ro", "/"


@cache
def bubblewrap_refusal() -> str | None:
    """Why bubblewrap does not work here: it is not installed, or may not make namespaces. It is tried once."""
    if find_bubblewrap() is None:
        return "finds no program 'bwrap': install the package bubblewrap"
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(  # noqa: S603 - the program that the user has chosen, on this interpreter
            [*_enclosure(), *_around(folder), interpreter(), "-S", "-c", "pass"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    if tried.returncode == 0:
        return None
    reason = tried.stderr.strip().replace("\n", "; ") or f"exit code {tried.returncode}"
    return (
        f"cannot use bubblewrap ({reason}): allow user namespaces (sysctl user.max_user_namespaces, and in a container "
        "the right to make them)"
    )


_SANDBOXES: Mapping[str, Sandbox] = {sandbox.name: sandbox for sandbox in (Sandbox(), BubblewrapSandbox())}
"""By name; `auto` tries them in this order."""


def choose_sandbox(name: SandboxName, *, allow_weaker: bool = False) -> Sandbox:
    """The sandbox of a name, or the first one that works.

    A sandbox with all of its layers is preferred to one that lacks some, even if the user accepts that.

    Raises:
        ValueError: There is no such sandbox.
        RuntimeError: It cannot be used on this machine; the text begins with a verb.
    """
    if name != "auto" and name not in _SANDBOXES:
        raise ValueError(f"sandbox='{name}' must be auto, {' or '.join(_SANDBOXES)}")
    chosen = list(_SANDBOXES.values()) if name == "auto" else [_SANDBOXES[name]]
    for weaker in dict.fromkeys((False, allow_weaker)):
        problems = [(sandbox, sandbox.refusal(allow_weaker=weaker)) for sandbox in chosen]
        for sandbox, problem in problems:
            if problem is None:
                return sandbox
    raise RuntimeError("; and ".join(f"with sandbox={sandbox.name} {problem}" for sandbox, problem in problems))
