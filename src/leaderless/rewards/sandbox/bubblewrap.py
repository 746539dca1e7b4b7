"""A sandbox in namespaces that bubblewrap makes (`bwrap`, a program of most distributions). Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from leaderless.rewards.sandbox.builtin import PACKAGES, interpreter, libraries, system_paths
from leaderless.rewards.sandbox.kernel_limits import Layers
from leaderless.rewards.sandbox.protocol import Sandbox

_PROBE_TIMEOUT_S = 30.0
_BARE = ("--unshare-all", "--new-session", "--clearenv", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev")
"""Namespaces of its own for processes, network, files and the rest, without rights."""


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
