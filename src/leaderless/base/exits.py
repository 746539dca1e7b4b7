"""How processes have ended, in words."""

from __future__ import annotations

import signal


def exit_in_words(code: int) -> str:
    """The exit code of a process in words; a negative one is the number of a signal."""
    return f"exit code {code}" if code >= 0 else f"the signal {signal.Signals(-code).name}"
