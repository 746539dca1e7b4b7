"""Bounds that were lowered because memory had run out, kept for the next start of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping

from leaderless.observability.run_directory import RunDirectory, write_atomically


def read_limits(directory: RunDirectory) -> Mapping[str, int]:
    """Most tokens of one pass by role, for roles whose passes have not fitted into memory.

    Args:
        directory: Folder of the run.
    """
    if not directory.limits.exists():
        return {}
    limits: dict[str, int] = json.loads(directory.limits.read_text(encoding="utf-8"))["micro_batch_tokens"]
    return limits


def lower_limit(directory: RunDirectory, role: str, num_tokens: int) -> None:
    """Write down a lower bound, unless one lower still is known.

    Args:
        directory: Folder of the run.
        role: Role whose passes did not fit.
        num_tokens: Largest number of tokens of a pass from now on.
    """
    limits = dict(read_limits(directory))
    limits[role] = min(num_tokens, limits.get(role, num_tokens))
    write_atomically(directory.limits, json.dumps({"micro_batch_tokens": limits}, indent=2))
