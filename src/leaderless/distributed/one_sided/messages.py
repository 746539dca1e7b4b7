"""Messages of a process group by NIXL: how its ranks connect, and how a round begins and ends."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leaderless.distributed.one_sided.endpoint import POLL_S, NixlEndpoint, NixlMessage
from leaderless.distributed.one_sided.frames import PROTOCOL
from leaderless.planner import format_ranks

if TYPE_CHECKING:
    from leaderless.distributed.transport import ProcessGroup

DEADLINE_SHARE = 0.9
"""Part of a process group's timeout after which a rank stops waiting for messages."""
ADDRESSES = "addresses for NIXL"
"""Name of the messages by which ranks connect, in errors."""
CALL_S = 2.0
"""Pause between notifications to ranks whose messages do not come: they fail once a process has ended."""


@dataclass
class NixlRound:
    """The messages of a round in flight; it waits like an operation of torch."""

    endpoint: NixlEndpoint
    messages: Sequence[NixlMessage]
    timeout_s: float

    def is_completed(self) -> bool:
        """Whether all messages have arrived and been taken, or one of them cannot be."""
        self.endpoint.progress()
        return all(message.is_over for message in self.messages) or any(message.error for message in self.messages)

    def wait(self) -> bool:
        """Wait until all messages have arrived and been taken.

        Raises:
            RuntimeError: A rank cannot be reached, has stopped, or has not answered in time. Nothing stays registered.
        """
        try:
            self._wait()
        except BaseException as error:
            self.endpoint.close(f"rank {self.endpoint.rank} has stopped waiting: {error}")
            raise
        self.endpoint.forget(self.messages)
        return True

    def _wait(self) -> None:
        now = time.monotonic()
        end, call = now + self.timeout_s, now + CALL_S
        while not self.is_completed():
            now = time.monotonic()
            late = sorted({message.peer for message in self.messages if not message.is_over}) if now > call else []
            if now > end:
                raise RuntimeError(f"nothing has come for {self.timeout_s:g} s")
            if late:
                self.endpoint.call(self.messages[0].key[1], late)
                call = now + CALL_S
            time.sleep(POLL_S)
        for message in self.messages:
            if message.error:
                raise RuntimeError(message.error)


def check_versions(world: ProcessGroup, endpoint: NixlEndpoint) -> None:
    """Compare the versions of NIXL. All ranks call it together.

    Raises:
        RuntimeError: Some ranks have another one.
    """
    found = endpoint.library.version
    if others := world.unlike_first(f"{PROTOCOL} {found}", "the versions of NIXL"):
        raise RuntimeError(
            f"rank {world.rank}: ranks {format_ranks(others)} have another version of NIXL than rank 0 (here {found}): "
            "install the same one on all machines, or set run.transport=torch"
        )


def begin_round(
    group: ProcessGroup,
    endpoint: NixlEndpoint,
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
) -> NixlRound:
    """Begin to send values to some ranks, and to receive values from some; connect with those that are new."""
    tag = _tag(group)
    peers = {peer for peer, _ in (*sent, *received)}
    new = sorted(peer for peer in peers if not endpoint.is_connected(tag, peer))
    if new:
        _connect(group, endpoint, tag, new)
    return NixlRound(endpoint, endpoint.begin(tag, group.lane, sent, received), DEADLINE_SHARE * group.timeout_s)


def _connect(group: ProcessGroup, endpoint: NixlEndpoint, tag: int, peers: Sequence[int]) -> None:
    """Connect with ranks that do so at the same time.

    Whether ranks have connected is kept by process group: both ends know it there, as messages have an order. Each
    waits until the other has connected, too, or gives the reason why it cannot: it could not read memory of a rank that
    it does not know yet.

    Raises:
        RuntimeError: This rank or one of the others cannot connect.
    """
    by_torch = replace(group, endpoint=None, payload_device=torch.device("cpu"))
    problems = list[str]()
    for peer, metadata in by_torch.exchange(dict.fromkeys(peers, endpoint.metadata()), peers, ADDRESSES).items():
        try:
            endpoint.connect(tag, peer, metadata)
        except RuntimeError as error:
            problems.append(str(error))
    mine = torch.tensor(list("; ".join(problems).encode()), dtype=torch.uint8)
    for peer, theirs in by_torch.exchange(dict.fromkeys(peers, mine), peers, ADDRESSES).items():
        if len(theirs):
            problems.append(f"rank {peer} cannot connect: {bytes(theirs.numpy()).decode()}")
    if problems:
        raise RuntimeError("; ".join(problems))


def _tag(group: ProcessGroup) -> int:
    """A number for a process group, the same on all its ranks, and another one for each."""
    return int.from_bytes(hashlib.sha256(group.torch_group.group_name.encode()).digest()[:7], "little")
