"""Where the Megatron processes of a model meet, and the place of each."""

from __future__ import annotations

import secrets
import socket
import tempfile
from pathlib import Path

from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout


def megatron_rank(layout: Layout, rank: int) -> int:
    """The place of a rank's process in Megatron's order, in which `pp` is the outermost axis and `dp` comes next."""
    at = layout.coordinates(rank)
    return (at["pp"] * layout.dp + at["dp"]) * layout.tp + at["tp"]


def choose_meeting(layout: Layout, group: ProcessGroup) -> str:
    """Choose where processes of all ranks meet: in a file on one machine, else at the first one's machine.

    All ranks call it together.
    """
    first = next(rank for rank in layout.ranks if megatron_rank(layout, rank) == 0)
    if len({group.hosts.get(rank, -1 - rank) for rank in group.ranks}) == 1:
        place = f"file://{Path(tempfile.gettempdir(), f'leaderless-megatron-{secrets.token_hex(8)}')}"
    else:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = f"tcp://{socket.getfqdn()}:{probe.getsockname()[1]}"
    return group.broadcast_text(place, first, "where Megatron's processes meet")
