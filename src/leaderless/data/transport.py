"""What ranks say to each other: small agreed numbers, and bytes from peer to peer.

Every wait has the deadline that the run gave its process groups, and an error says which rank waited for what. Nothing
is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from leaderless.data.errors import CollectiveError

MESSAGE_CHUNK_BYTES = 1 << 28
"""Longer messages travel in pieces of this size."""


@dataclass
class Traffic:
    """Bytes of payload that a rank has sent to and received from others."""

    sent: int = 0
    received: int = 0


@dataclass
class Group:
    """Some ranks that decide and exchange together.

    Attributes:
        ranks: Ascending, as numbered in the whole run.
        rank: This process, as numbered in the whole run.
        handle: The process group; None stands for all ranks.
        payload_device: Where the backend wants bytes that travel.
        traffic: What this rank has sent and received through `exchange`.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    payload_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def sum(self, values: Tensor, what: str) -> Tensor:
        """The sum over all ranks, the same on each.

        Args:
            values: Of the same shape on every rank.
            what: What is waited for, for the error.
        """
        return self._all_reduce(values, dist.ReduceOp.SUM, what)

    def max(self, values: Tensor, what: str) -> Tensor:
        """The largest over all ranks, the same on each.

        Args:
            values: Of the same shape on every rank.
            what: What is waited for, for the error.
        """
        return self._all_reduce(values, dist.ReduceOp.MAX, what)

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        result = values.clone()
        if self.size > 1:
            with self._waiting(what):
                dist.all_reduce(result, operation, group=self.handle)
        return result

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:
        """The rows of every rank.

        Args:
            rows: [n, ...], with an n of its own on each rank.
            what: What is waited for, for the error.

        Returns:
            One tensor for each rank, in the order of `ranks`.
        """
        if self.size == 1:
            return [rows]
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.ranks.index(self.rank)] = rows.shape[0]
        counts = self.sum(counts, what)
        padded = rows.new_zeros((int(counts.max()), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = padded.new_empty((self.size, *padded.shape))
        with self._waiting(what):
            dist.all_gather(list(gathered.unbind(0)), padded, group=self.handle)
        return [part[:count] for part, count in zip(gathered.unbind(0), counts.tolist(), strict=True)]

    def unlike_first(self, text: str, what: str) -> tuple[int, ...]:
        """The ranks whose text is not that of the first, the same answer on all; short however long the text is.

        Args:
            text: Of this rank.
            what: What is waited for, for the error.
        """
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        bounds = self.max(torch.tensor([digest, -digest]), what)
        if bounds[0] == -bounds[1]:
            return ()
        digests = torch.cat(self.gather(torch.tensor([digest]), what))
        return tuple(self.ranks[place] for place in (digests != digests[0]).nonzero().squeeze(1).tolist())

    def broadcast_text(self, text: str, source: int, what: str) -> str:
        """A text of one rank, told to all.

        Args:
            text: What `source` says; not looked at on other ranks.
            source: The rank that speaks, as numbered in the whole run.
            what: What is waited for, for the error.
        """
        if self.size == 1:
            return text
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
        size = torch.tensor([encoded.numel()])
        with self._waiting(what):
            dist.broadcast(size, source, group=self.handle)
            if self.rank != source:
                encoded = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(encoded, source, group=self.handle)
        return bytes(encoded.numpy()).decode()

    def exchange(self, messages: Mapping[int, Tensor], senders: Sequence[int], what: str) -> dict[int, Tensor]:
        """Send bytes to some ranks and receive from some, directly.

        Args:
            messages: [num_bytes] uint8 for each rank that gets one; no message to oneself.
            senders: Ranks that have a message for this one.
            what: What is waited for, for the error.

        Returns:
            [num_bytes] uint8 in host memory, by sender.
        """
        with self._waiting(what):
            sizes = {sender: torch.zeros(1, dtype=torch.int64) for sender in senders}
            lengths = {receiver: torch.tensor([message.numel()]) for receiver, message in messages.items()}
            self._transfer(lengths, sizes)
            device = self.payload_device
            received = {
                sender: torch.empty(int(size), dtype=torch.uint8, device=device) for sender, size in sizes.items()
            }
            self._transfer({receiver: message.to(device) for receiver, message in messages.items()}, received)
        self.traffic.sent += sum(message.numel() for message in messages.values())
        self.traffic.received += sum(message.numel() for message in received.values())
        return {sender: message.cpu() for sender, message in received.items()}

    def _transfer(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send and receive tensors whose sizes both sides know."""
        operations = [
            dist.P2POp(operation, part, peer, group=self.handle)
            for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for peer, tensor in sorted(tensors.items())
            for part in torch.split(tensor, MESSAGE_CHUNK_BYTES)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Name what was waited for when a backend gives up."""
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in self.ranks if rank != self.rank]
            raise CollectiveError(f"rank {self.rank} waited for {what} with ranks {others}: {error}") from error


class Transport:
    """The process groups of a run. Every rank makes them in the same order, before the first step."""

    def __init__(self, payload_device: torch.device, timeout_s: float) -> None:
        """Take the whole world as the first group.

        Args:
            payload_device: Where the backend wants bytes that travel.
            timeout_s: Longest wait in any group that is made here.
        """
        self.rank = dist.get_rank()
        self.payload_device = payload_device
        self.timeout = timedelta(seconds=timeout_s)
        self.world = Group(tuple(range(dist.get_world_size())), self.rank, None, payload_device)
        self._groups: dict[tuple[int, ...], Group] = {self.world.ranks: self.world}

    def add_group(self, ranks: tuple[int, ...]) -> None:
        """Make the group of some ranks, if there is none yet. All ranks of the world call it, members or not.

        Args:
            ranks: Ascending.
        """
        if ranks not in self._groups:
            handle = dist.new_group(list(ranks), timeout=self.timeout)
            self._groups[ranks] = Group(ranks, self.rank, handle, self.payload_device)

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The group of some ranks, which this rank belongs to.

        Args:
            ranks: Ascending, and passed to `add_group` before.
        """
        assert self.rank in ranks, f"rank {self.rank} is not one of {ranks}"
        return self._groups[ranks]

    def traffic(self) -> Traffic:
        """Payload that this rank has exchanged in all groups."""
        groups = self._groups.values()
        return Traffic(sum(g.traffic.sent for g in groups), sum(g.traffic.received for g in groups))
