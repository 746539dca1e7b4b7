"""One HTML file about a run: curves, warnings, samples, plan and recipe. It loads nothing and needs no torch.

The functions are loaded on first use, so that a process that reads samples of a run makes no page.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leaderless.observability.report.page import render_report as render_report
    from leaderless.observability.report.page import write_report as write_report

_NAMES = ("render_report", "write_report")


def __getattr__(name: str) -> object:
    """Import a public name from the module that owns it."""
    if name in _NAMES:
        return getattr(import_module("leaderless.observability.report.page"), name)
    raise AttributeError(f"module 'leaderless.observability.report' has no attribute {name!r}")
