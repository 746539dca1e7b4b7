"""Writes the reference of job options."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import BaseModel

from leaderless.run.clusters.options import OPTIONS


def submit_page(section: Callable[[type[BaseModel], str, str], Iterator[str]]) -> str:
    """What each scheduler may be asked for; `section` describes the settings of one model."""
    parts = [
        "# Job options",
        (
            "What `leaderless submit --to SCHEDULER --option key=value` may ask a scheduler for. "
            "[Many machines](../guides/many-machines.md#a-clusters-scheduler) explains how they are used. A list is "
            "written as `--option 'setup=[\"source .venv/bin/activate\"]'`, and an entry of a section as "
            "`--option volumes.CLAIM=/runs`."
        ),
    ]
    for name, options in OPTIONS.items():
        parts += section(options, name, options.__doc__ or "")
    return "\n\n".join(parts)
