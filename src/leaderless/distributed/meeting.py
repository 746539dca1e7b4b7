"""Places at which processes of other packages find each other, where several ranks have one each."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from pathlib import Path

import psutil

from leaderless.distributed.transport import ProcessGroup

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface by which ranks reach each other, where their names do not tell."""


def choose_meeting(group: ProcessGroup, first: int, name: str, what: str) -> str:
    """Choose where processes of all ranks of a group meet: in a file of one machine, else at the first one's machine.

    All ranks of the group call it together.

    Args:
        group: Ranks whose processes meet.
        first: Rank whose process is the first of them, which listens where there are several machines.
        name: First part of the name of a file.
        what: Description of the wait, for an error.

    Returns:
        `file://PATH` or `tcp://ADDRESS:PORT`, the same on all ranks.
    """
    if are_together(group):
        place = f"file://{Path(tempfile.gettempdir(), f'{name}-{secrets.token_hex(8)}')}"
    else:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = f"tcp://{own_address()}:{probe.getsockname()[1]}"
    return group.broadcast_text(place, first, what)


def are_together(group: ProcessGroup) -> bool:
    """Whether all ranks of a group are on one machine."""
    return len({group.hosts.get(rank, -1 - rank) for rank in group.ranks}) == 1


def own_address() -> str:
    """The address by which other machines reach this one: that of the interface that the user names, or its name."""
    named = (os.environ.get(INTERFACE) or "").split(",")[0]
    for address in psutil.net_if_addrs().get(named, ()):
        if address.family == socket.AF_INET:
            return address.address
    return socket.getfqdn()
