"""How ranks communicate: small numbers that all agree on, and bytes from peer to peer. Nothing is pickled.

Every wait has the deadline that the run gave its process groups, and an error names the rank and what it waited for.
An accelerator waits by itself, while the host goes on: after few more messages the host waits, too, to notice a rank
that is missing before the backend ends the process.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store, _world

from leaderless.distributed.activity import Activity
from leaderless.distributed.block_sums import all_reduce_in_blocks
from leaderless.distributed.errors import CollectiveError
from leaderless.distributed.in_flight import (
    MESSAGES_AHEAD,
    Backlog,
    Operation,
    PendingMessage,
    RoundUnderWay,
    fetch,
    incoming,
    outgoing,
)
from leaderless.distributed.one_sided.endpoint import NixlEndpoint
from leaderless.distributed.one_sided.messages import NixlRound, begin_round, check_versions
from leaderless.distributed.roll_call import silent_ranks
from leaderless.planner import Layout, format_ranks
from leaderless.planner.assign.blocks import is_in_blocks
from leaderless.planner.layout import BACK
from leaderless.planner.memory.limits import ROUNDS_AHEAD

POLL_S = 0.0002
"""Pause between two checks whether an accelerator has finished an exchange."""
DEADLINE_SHARE = 0.9
"""Part of the timeout after which a rank gives up waiting for an accelerator: before the backend ends the process."""

IN_BLOCKS_BYTES = 1 << 16
"""Most bytes of values that many ranks combine in blocks; larger ones go round a ring in parts."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older releases of torch

Round = tuple[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]]
"""Messages that a rank sends and receives together, by peer: uint8 in host memory, or on the device that moves payload;
`received` is filled in place."""


@dataclass
class ProcessGroup:
    """Some ranks that decide and exchange together. Errors name what was waited for, the `what` of each method.

    Attributes:
        ranks: Members, ascending, as numbered in the whole run.
        rank: This process, as numbered in the whole run.
        handle: Process group of torch; None stands for all ranks.
        payload_device: Device from and to which the backend moves payload.
        hosts: Number of each rank's machine; ranks that are not named are on machines of their own.
        activity: Record of when this rank waits for others.
        timeout_s: Longest wait for an exchange on an accelerator.
        backlog: Messages for which only the accelerator waits, in all process groups of this rank.
        endpoint: NIXL on this rank, which moves rows and weights; without it torch does.
        lane: Name of the background thread's messages; empty for the main thread.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None
    payload_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hosts: Mapping[int, int] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)
    timeout_s: float = math.inf
    backlog: Backlog = field(default_factory=Backlog, repr=False, compare=False)
    endpoint: NixlEndpoint | None = field(default=None, repr=False, compare=False)
    lane: str = ""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        """These ranks as torch has them."""
        group = self.handle or dist.group.WORLD
        assert group is not None
        return group

    def warm_up(self) -> None:
        """Connect all ranks through the backend that moves payload. All of them call it together.

        With NCCL the first use of a process group must be a collective of all its ranks: an exchange, in which some
        may have nothing to do, would hang. All later messages use this communicator, as they are sent in batches, if of
        one message: `isend` or `irecv` alone would make another one for each two ranks, in the middle of a step.
        """
        if self.size > 1:
            with self._waiting("the first message of a process group"):
                dist.all_reduce(torch.zeros(1, device=self.payload_device), group=self.handle)

    def sum(self, values: Tensor, what: str, *, most_ahead: int = 0) -> Tensor:
        """The sum over all ranks, the same on each, of values in the same shape; for `most_ahead` see `Backlog.add`."""
        return self._all_reduce(values, dist.ReduceOp.SUM, what, most_ahead)

    def max(self, values: Tensor, what: str, *, most_ahead: int = 0) -> Tensor:
        """The largest over all ranks, the same on each; see `sum`."""
        return self._all_reduce(values, dist.ReduceOp.MAX, what, most_ahead)

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, what: str, most_ahead: int) -> Tensor:
        if self.size == 1:
            return values.clone()
        if is_in_blocks(self.size) and values.device.type == "cpu" and values.nbytes <= IN_BLOCKS_BYTES:
            return all_reduce_in_blocks(self, values, operation, what)
        result = values.clone()
        with self._waiting(what):
            dist.all_reduce(result, operation, group=self.handle)
        self.backlog.add(self, what, result.device, most_ahead)
        return result

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:
        """The rows [n, ...] of every rank, in the order of `ranks`; each rank may have another n."""
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
        self.backlog.add(self, what, rows.device, 0)
        return [part[:count] for part, count in zip(gathered.unbind(0), counts.tolist(), strict=True)]

    def gather_even(self, values: Tensor, what: str) -> Tensor:
        """[size, ...]: the values of every rank, in the order of `ranks`; they have the same shape on each."""
        gathered = values.new_empty((self.size, *values.shape))
        with self._waiting(what):
            _all_gather(gathered.view(-1), values.flatten(), group=self.handle)
        self.backlog.add(self, what, values.device, MESSAGES_AHEAD)
        return gathered

    def swap(self, values: Tensor, what: str, *, most_ahead: int = MESSAGES_AHEAD) -> Tensor:
        """[size, ...]: what every rank has for this one, from what this one has for every rank, in the same shape."""
        received = torch.empty_like(values)
        with self._waiting(what):
            dist.all_to_all_single(received, values, group=self.handle)
        self.backlog.add(self, what, values.device, most_ahead)
        return received

    def swap_numbers(self, values: Tensor, what: str) -> list[list[int]]:
        """Like `swap`, with a number for each rank, which the host waits for: those that come, and those that go."""
        return torch.stack([self.swap(values, what, most_ahead=0), values]).tolist()

    def pass_on(self, values: Tensor, what: str) -> PendingMessage:
        """Begin to send values to the next rank, and to receive values of the same shape from the previous one.

        All ranks call it together, and wait for the result at any time later. The last rank sends to the first.
        """
        place, received = self.ranks.index(self.rank), torch.empty_like(values)
        sent = [(self.ranks[(place + 1) % self.size], values)]
        works = self._batch(sent, [(self.ranks[place - 1], received)], what)
        return PendingMessage(self, what, works, received, values)

    def send(self, values: Tensor, receiver: int, what: str) -> PendingMessage:
        """Begin to send values to one rank, as numbered in the whole run, which calls `receive`.

        The messages of a process group follow one another, also between other ranks: an accelerator sends and receives
        them in the order in which a rank has asked for them, and each waits for its other end.
        """
        return PendingMessage(self, what, self._batch([(receiver, values)], [], what), values)

    def receive(self, values: Tensor, sender: int, what: str) -> Tensor:
        """Fill values with those that one rank sends, of the same shape and type; messages come in their order."""
        self._order(self._batch([], [(sender, values)], what), what, values.device)
        return values

    def _batch(
        self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], what: str
    ) -> Sequence[dist.Work]:
        """Begin to send values to some ranks, and to receive values from some, in the memory that the backend reads."""
        operations = [
            *(dist.P2POp(dist.irecv, values, peer, group=self.handle) for peer, values in received),
            *(dist.P2POp(dist.isend, values, peer, group=self.handle) for peer, values in sent),
        ]
        with self._waiting(what):
            return dist.batch_isend_irecv(operations) if operations else []

    def swap_uneven(self, values: Tensor, sent: list[int], received: list[int], what: str) -> Tensor:
        """[n, ...]: the rows that every rank has for this one, from those that this one has for every rank, in order.

        Values are the rows for the first rank, then those for the next, and so on; `sent` and `received` are the
        numbers of rows for each rank and from each.
        """
        arrived = values.new_empty(sum(received), *values.shape[1:])
        with self._waiting(what):
            dist.all_to_all_single(arrived, values, received, sent, group=self.handle)
        self.backlog.add(self, what, values.device, MESSAGES_AHEAD)
        return arrived

    def unlike_first(self, text: str, what: str) -> tuple[int, ...]:
        """The ranks whose text differs from the first rank's, the same answer on all; only digests are sent."""
        digests = torch.cat(self.gather(torch.tensor([digest(text.encode())]), what))
        return tuple(self.ranks[place] for place in (digests != digests[0]).nonzero().squeeze(1).tolist())

    def broadcast_text(self, text: str, source: int, what: str) -> str:
        """Send the text of the rank `source`, as numbered in the whole run, to all; other ranks may give any text."""
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
        """Send messages, [num_bytes] uint8 each, to other ranks, and receive messages from some senders, directly."""
        sizes = {sender: torch.zeros(8, dtype=torch.uint8) for sender in senders}
        lengths = {receiver: torch.tensor([len(message)]).view(torch.uint8) for receiver, message in messages.items()}
        self._finish(self._begin(sorted(lengths.items()), sorted(sizes.items()), what), what)
        received = {
            sender: torch.empty(int(size.view(torch.int64)), dtype=torch.uint8) for sender, size in sizes.items()
        }
        self.exchange_rounds([(sorted(messages.items()), sorted(received.items()))], what)
        return received

    def exchange_rounds(self, rounds: Iterable[Round], what: str) -> None:
        """Send bytes to some ranks and receive from some, directly, where both sides know how many.

        Each peer has the matching messages in the same round. The next round is prepared while the last one is sent;
        all rounds before the last are done by then, or, between accelerators, come before what the device does next.
        """
        for _ in self.exchanging(rounds, what):
            pass

    def exchanging(self, rounds: Iterable[Round], what: str) -> Iterator[None]:
        """Like `exchange_rounds`, but yield after each round that is done, while the next is sent."""
        under_way: deque[RoundUnderWay] = deque()
        try:
            for sent, received in rounds:
                under_way.append(self._begin(sent, received, what))
                if len(under_way) == ROUNDS_AHEAD:
                    self._finish(under_way.popleft(), what)
                    yield
            while under_way:
                self._finish(under_way.popleft(), what)
                yield
        finally:
            if under_way and self.endpoint is not None:
                self.endpoint.close(f"rank {self.rank} has stopped in the middle of {what}")

    def gather_equal(self, data: Tensor, what: str) -> PendingMessage:
        """Begin to gather [bytes] uint8, as many on each rank, on the device that moves payload, to [ranks, bytes].

        All ranks call it together, and wait for the result at any time later.
        """
        gathered = data.new_empty(self.size, len(data))
        with self._waiting(what):
            work = _all_gather(gathered.view(-1), data, group=self.handle, async_op=True)
        return PendingMessage(self, what, [work], gathered, data)

    def broadcast(self, values: Tensor, source: int, what: str) -> Tensor:
        """The values of the rank `source`, as numbered in the whole run; other ranks' only have the same shape."""
        result = values.clone()
        if self.size > 1:
            with self._waiting(what):
                dist.broadcast(result, source, group=self.handle)
            self.backlog.add(self, what, result.device, 0)
        return result

    def _begin(
        self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], what: str
    ) -> RoundUnderWay:
        here = [(peer, message, incoming(message, self.payload_device)) for peer, message in received if len(message)]
        away = [(peer, outgoing(message, self.payload_device)) for peer, message in sent if len(message)]
        coming = [(peer, there) for peer, _, there in here]
        works: Sequence[Operation]
        if self.endpoint is None:
            works = self._batch(away, coming, what)
        else:
            with self._waiting(what):
                works = [begin_round(self, self.endpoint, away, coming)]
        stays = all(message.device == self.payload_device for _, message in (*sent, *received))
        arriving = [(message, there) for _, message, there in here]
        return RoundUnderWay(works, arriving, [there for _, there in away], stays)

    def _finish(self, under_way: RoundUnderWay, what: str) -> None:
        """Wait for a round; only the device waits, if nothing comes from or goes to the memory of the host."""
        if under_way.stays:
            self._order(under_way.works, what, self.payload_device)
            return
        self._wait(under_way.works, what, self.payload_device)
        fetch(under_way.received, self.payload_device)

    def _order(self, works: Sequence[Operation], what: str, device: torch.device) -> None:
        """Let what follows on a device come after operations on its memory; on a CPU the host waits for them."""
        with self._waiting(what):
            for work in works:
                work.wait()
        if works:
            self.backlog.add(self, what, device, MESSAGES_AHEAD)

    def _wait(self, works: Sequence[Operation], what: str, device: torch.device) -> None:
        if device.type != "cpu":
            self.backlog.wait()
        with self._waiting(what):
            begin = time.monotonic()
            for work in works:
                # An accelerator's `wait` only queues, and would never name a missing rank.
                if device.type != "cpu" and not isinstance(work, NixlRound):
                    self._poll(work.is_completed, begin)
                work.wait()  # what follows on the device comes after it

    def _poll(self, is_done: Callable[[], bool], begin: float) -> None:
        """Wait for an accelerator, for some time since `begin`."""
        end = begin + DEADLINE_SHARE * self.timeout_s
        while not is_done():
            if time.monotonic() > end:
                raise RuntimeError(f"nothing has come for {DEADLINE_SHARE * self.timeout_s:g} s")
            time.sleep(POLL_S)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Name what was waited for, and for whom, when a backend gives up."""
        try:
            with self.activity.waiting(what):
                yield
        except RuntimeError as error:
            others = [rank for rank in self.ranks if rank != self.rank]
            silent = silent_ranks(self.rank, others)
            blame = f"; nothing is heard of {'ranks' if len(silent) > 1 else 'rank'} {format_ranks(silent)}"
            raise CollectiveError(
                f"rank {self.rank} waited for {what} with ranks {others}{blame if silent else ''}: {error}"
            ) from error


def digest(content: bytes) -> int:
    """A number that identifies some content; it fits into int64."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "little")


class Transport:
    """The process groups of a run. Every rank makes them in the same order, before the first step or for a new plan."""

    def __init__(
        self,
        payload_device: torch.device,
        timeout_s: float,
        host: str | None = None,
        activity: Activity | None = None,
        sharing: Mapping[int, int] | None = None,
        endpoint: NixlEndpoint | None = None,
    ) -> None:
        """Take the whole world as the first process group. All ranks call it together.

        Args:
            payload_device: Device from and to which the backend moves payload.
            timeout_s: Longest wait in any process group that is made here.
            host: Name of this machine, the same for all its ranks; by default the one that the system gives it.
            activity: Record of the main thread's waits; a new one when None.
            sharing: Ranks that use the device of another one, with the latter. Libraries of accelerators connect
                devices and not processes: process groups of both move payload through host memory.
            endpoint: NIXL on this rank, for rows and weights, on all ranks or none; by default torch sends them.

        Raises:
            RuntimeError: NIXL is of different versions on some ranks.
        """
        self._sharing = sharing or {}
        self.rank = dist.get_rank()
        self.payload_device = payload_device
        self.timeout = timedelta(seconds=timeout_s)
        self.activity = activity or Activity()
        ranks = tuple(range(dist.get_world_size()))
        self.world = ProcessGroup(
            ranks, self.rank, None, self._payload_of(ranks), activity=self.activity, timeout_s=timeout_s
        )
        self.world.warm_up()
        if endpoint is not None:
            check_versions(self.world, endpoint)
            self.world.endpoint = endpoint
        name = host or f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
        digests = torch.cat(self.world.gather(torch.tensor([digest(name.encode())]), "the names of all hosts"))
        self.world.hosts = dict(enumerate(torch.unique(digests, return_inverse=True)[1].tolist()))
        self._groups: dict[tuple[int, ...], ProcessGroup] = {self.world.ranks: self.world}
        self._peers: dict[tuple[int, ...], ProcessGroup] = {}  # apart, as each rank has others
        self._back: dict[tuple[int, ...], ProcessGroup] = {}  # the same ranks as others, in the other direction
        self._meshes: set[Layout] = set()
        self._lanes: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}

    def close(self, error: str = "") -> None:
        """Release what moves rows and weights. With an error, others that wait for this rank stop waiting."""
        if self.world.endpoint is not None:
            self.world.endpoint.close(f"rank {self.rank} has failed: {error}" if error else "")

    def store(self) -> Store:
        """A separate connection to the rendezvous store, for a thread other than the main one."""
        return _get_default_store().clone()  # type: ignore[attr-defined, no-any-return]

    def add_axes(self, layouts: Iterable[Layout]) -> None:
        """Make the process groups of layouts with several axes: of peers along each, and of ranks with the same rows.

        All ranks of the world call it together. A rank makes those that it is in, however many others there are. Torch
        names such a group by its ranks and the number of groups that the process has, so ranks that have fewer than
        others first make groups of themselves alone, and a rank outside a layout does so, too.
        """
        new = [layout for layout in dict.fromkeys(layouts) if layout.peer_groups and layout not in self._meshes]
        if not new:
            return
        self._meshes.update(new)
        mine = len(_world.pg_names)
        most = int(self.world.max(torch.tensor([mine]), "the number of process groups"))
        for _ in range(most - mine):
            self._make_alone((self.rank,))
        for layout in new:
            for peers in layout.peer_groups:
                ranks = peers(self.rank) if self.rank in layout else (self.rank,)
                self._keep(self._peers, ranks, self._make_alone(ranks))
            if layout.pp > 1:
                ranks = layout.peers(self.rank, "pp") if self.rank in layout else (self.rank,)
                self._keep(self._back, ranks, self._make_alone(ranks))

    def _make_alone(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        handle: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
        return handle

    def add_process_group(self, ranks: tuple[int, ...]) -> None:
        """Make the process group of some ranks, ascending, if there is none yet. All ranks of the world call it."""
        if ranks not in self._groups:
            self._keep(self._groups, ranks, dist.new_group(list(ranks), timeout=self.timeout))

    def _keep(
        self, groups: dict[tuple[int, ...], ProcessGroup], ranks: tuple[int, ...], handle: dist.ProcessGroup
    ) -> None:
        if ranks not in groups:
            groups[ranks] = replace(self.world, ranks=ranks, handle=handle, payload_device=self._payload_of(ranks))
            if self.rank in ranks:
                groups[ranks].warm_up()

    def _payload_of(self, ranks: Sequence[int]) -> torch.device:
        is_shared = any(rank in ranks and owner in ranks for rank, owner in self._sharing.items())
        return torch.device("cpu") if is_shared else self.payload_device

    def add_lane(self, name: str, ranks: tuple[int, ...], patience: int = 1) -> None:
        """Make a process group of some ranks, ascending, for a background thread. All ranks of the world call it.

        Its bytes are sent from host memory: on an accelerator they would compete with the main thread's. Lanes of other
        names may have the same ranks. A wait may last `patience` timeouts, where the other end comes so much later.
        """
        if (name, ranks) not in self._lanes:
            handle = dist.new_group(list(ranks), timeout=self.timeout * patience, backend="gloo")
            self._lanes[name, ranks] = ProcessGroup(
                ranks,
                self.rank,
                handle,
                hosts=self.world.hosts,
                timeout_s=self.timeout.total_seconds() * patience,
                endpoint=self.world.endpoint,
                lane=f"{name} {format_ranks(ranks)}",
            )

    def process_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """The process group of some ranks, among them this one, for the main thread."""
        assert self.rank in ranks, f"rank {self.rank} is not one of {ranks}"
        return self._groups.get(ranks) or self._peers[ranks]

    def axis_groups(self, layout: Layout) -> dict[str, ProcessGroup]:
        """The process groups of this rank along each axis of a layout; see `EngineSetup`."""
        groups = {name: self.process_group(peers) for name, peers in layout.named_peers(self.rank).items()}
        return groups | {BACK: self._back[groups["pp"].ranks]} if layout.pp > 1 else groups

    def lane(self, name: str, ranks: tuple[int, ...]) -> ProcessGroup:
        """The process group of some ranks, among them this one, that was made for a lane."""
        assert self.rank in ranks, f"rank {self.rank} is not one of {ranks}"
        return self._lanes[name, ranks]
