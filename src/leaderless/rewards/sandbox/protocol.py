"""Sandboxes, which enclose the supervisor that runs programs. Imports no torch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from leaderless.rewards.sandbox.kernel_limits import Layers, ask_layers, is_supported

_WEAKER = "use a newer kernel, or run with less and set allow_weaker=true, at your own risk"


class Sandbox(ABC):
    """Keeps programs that nobody has read away from everything else.

    Programs are run by a supervisor, a process that starts, limits, watches and ends them: see `Script` for one that is
    run on inputs, `Trial` for one that is tested, and `Interpreter` for one that is continued. A program gets a folder
    of its own, which is removed afterwards, and limits of memory, time, processes, files and output. It reaches no
    other file or process, and no network. A sandbox decides how the supervisor is started.
    """

    name: ClassVar[str]

    def refusal(self, *, allow_weaker: bool) -> str | None:
        """Why it cannot be used on this machine, and the remedy; None if it can.

        Args:
            allow_weaker: Whether the user accepts that the kernel lacks a layer.
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

    @abstractmethod
    def command(self, supervisor: Sequence[str], scratch: str) -> Sequence[str]:
        """The command line that starts the supervisor inside, given the one that starts it outside, and its folder."""
