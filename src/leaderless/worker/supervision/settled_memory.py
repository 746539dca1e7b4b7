"""Decisions of a run about memory, kept for its next start. A plan shows them, so this imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from leaderless.config.models import Whole
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner.memory.limits import MAX_LOGITS
from leaderless.planner.memory.rank import Room

_PASSES, _WHOLE, _LOGITS = "micro_batch_tokens", "keep_whole", "max_logits"


def read_limits(directory: RunDirectory) -> dict[str, int]:
    """Most tokens of one pass, for each role whose passes did not fit into memory."""
    return {role: int(num_tokens) for role, num_tokens in _read(directory, _PASSES).items()}


def lower_limit(directory: RunDirectory, role: str, num_tokens: int) -> None:
    """Write a lower bound for the passes of a role, unless an even lower one is known."""
    limits = read_limits(directory)
    limits[role] = min(num_tokens, limits.get(role, num_tokens))
    _write(directory, _PASSES, limits)


def read_room(directory: RunDirectory, num_ranks: int) -> Room | None:
    """Uses of memory when the run began on as many ranks; None if it did not."""
    keeps = _read(directory, _WHOLE).get(str(num_ranks))
    max_logits = _read(directory, _LOGITS).get(str(num_ranks), MAX_LOGITS)
    return None if keeps is None else Room(cast("Whole", keeps), int(max_logits))


def write_room(directory: RunDirectory, num_ranks: int, room: Room) -> None:
    """Write what memory is used for on a number of ranks."""
    for name, value in ((_LOGITS, room.max_logits), (_WHOLE, room.keeps)):
        _write(directory, name, {**_read(directory, name), str(num_ranks): value})


def _read_all(directory: RunDirectory) -> dict[str, Mapping[str, int | str]]:
    if not directory.limits.exists():
        return {}
    return cast("dict[str, Mapping[str, int | str]]", json.loads(directory.limits.read_text(encoding="utf-8")))


def _read(directory: RunDirectory, name: str) -> Mapping[str, int | str]:
    return _read_all(directory).get(name, {})


def _write(directory: RunDirectory, name: str, values: Mapping[str, int | str]) -> None:
    write_atomically(directory.limits, json.dumps({**_read_all(directory), name: values}, indent=2))
