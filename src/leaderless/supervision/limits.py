"""Bounds of a pass that were lowered because memory had run out, kept for the next start of the run."""

from __future__ import annotations

import json

from leaderless.observability.run_directory import RunDirectory, write_atomically


def read_limits(directory: RunDirectory) -> dict[str, int]:
    """Most tokens of one pass, for each role whose passes have not fitted into memory."""
    if not directory.limits.exists():
        return {}
    limits: dict[str, int] = json.loads(directory.limits.read_text(encoding="utf-8"))["micro_batch_tokens"]
    return limits


def lower_limit(directory: RunDirectory, role: str, num_tokens: int) -> None:
    """Write a lower bound for the passes of a role, unless one lower still is known."""
    limits = read_limits(directory)
    limits[role] = min(num_tokens, limits.get(role, num_tokens))
    write_atomically(directory.limits, json.dumps({"micro_batch_tokens": limits}, indent=2))
