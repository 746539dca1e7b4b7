"""What a sandbox is: what encloses the supervisor that runs programs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from leaderless.sandbox.messages import Setting


class Sandbox(Protocol):
    """Keeps programs that nobody has read away from everything else.

    Programs are run by a supervisor, a process that starts, limits, watches and ends them: see `Script` for one that is
    run on inputs, `Trial` for one that is tested, and `Interpreter` for one that is continued. A program gets a folder
    of its own, which is removed afterwards, and limits of memory, time, processes, files and output. It reaches no
    other file or process, and no network. A sandbox decides how the supervisor is started, and what its programs give
    up.
    """

    name: ClassVar[str]

    def refusal(self, *, allow_weaker: bool) -> str | None:
        """Why it cannot be used on this machine, and the remedy; None if it can.

        Args:
            allow_weaker: Whether the user accepts that the kernel lacks a layer.
        """

    def setting(self, scratch: str) -> Setting:
        """Surroundings of programs that have their folders in a given one."""

    def command(self, supervisor: Sequence[str], setting: Setting) -> Sequence[str]:
        """The command line that starts the supervisor inside, given the one that starts it outside."""
