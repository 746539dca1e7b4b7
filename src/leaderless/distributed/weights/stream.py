"""The weights of a role on the way from the ranks that hold them to those that use them.

Every message ends with the policy version of its weights and a checksum, which the ranks that use them compare. A rank
that finds an error takes part to the end, so that no other one is left waiting, and raises it then. An accelerator
compares checksums by itself, and after the last message the host reads what it has found, all at once: to wait for it
after each message would stop the next ones. No stream that was damaged ends without the error.

    message    pieces of weights | padding to a word | policy version | checksum of all before it

    bucket 1   sent    gathered    used
    bucket 2           sent        gathered    used
    bucket 3                       sent        gathered    used
    time       ------------------------------------------------>

A bucket is sent from its holders to ranks that each want a part of it. Where all of these want everything, they gather
the parts, and use whole weights while the next buckets are on their way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.distributed.in_flight import PendingMessage
from leaderless.distributed.transport import ProcessGroup, Round
from leaderless.distributed.weights.blocks import HeldWeights, WeightBlock, whole_block
from leaderless.distributed.weights.buckets import checksums
from leaderless.distributed.weights.route import RouteTurn, WeightPiece, WeightRoute, bucket_bytes

WORD = 8
"""Bytes of a word of a checksum."""
TRAILER = 2 * WORD
"""Bytes of a policy version and a checksum, at the end of each message."""
NO_VERSION, IN_ERROR = -1, -2
"""Versions in the message of a rank that has received nothing so far, and of one that has found an error."""
GATHERS_AHEAD = 2
"""Buckets whose gathers run at a time, or that are being used."""


class WeightStream:
    """Whole weights by name, one after the other, in the type in which their user computes.

    They may be tensors of a trainer: they are read and kept, but never written to.

    Attributes:
        policy_version: Number of optimizer steps that led to the weights; known once the first one has come.
        probe: A text and its log-probabilities with these weights, if the user of the stream asks for one.
    """

    def __init__(
        self, weights: Iterator[tuple[str, Tensor]], policy_version: int = NO_VERSION, probe: Probe | None = None
    ) -> None:
        self._weights, self.policy_version, self.probe = weights, policy_version, probe
        self.exact: frozenset[str] = frozenset()
        """Names of what keeps its own type on the way to an engine."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._weights)

    def each(self, change: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]) -> WeightStream:
        """The same stream, which from now on has in place of each weight what a function of its name makes of it."""
        weights = self._weights
        self._weights = (new for name, tensor in weights for new in change(name, tensor))
        return self

    def followed_by(self, values: Mapping[str, Tensor]) -> WeightStream:
        """The same stream, at whose end there is now what a model has besides weights, in its own type."""
        self._weights, self.exact = chain(self._weights, values.items()), self.exact | values.keys()
        return self

    def drain(self, beat: Callable[[], None] = lambda: None) -> None:
        """Go through what is left of the weights, as other ranks may wait for it; `beat` is called for each."""
        for _ in self._weights:
            beat()


@dataclass(frozen=True)
class Probe:
    """A text of at least two tokens, with the log-probabilities, [tokens - 1] float32, of all but the first."""

    tokens: Sequence[int]
    log_probs: Tensor


def send_weights(route: WeightRoute, held: HeldWeights, process_group: ProcessGroup) -> None:
    """Send weights from a rank that takes none. All ranks of the route call one of these functions together."""
    delivery = _Delivery(route, held, process_group)
    for _ in delivery.deliver(lambda _: {}):
        pass


def fill_weights(
    route: WeightRoute, target: HeldWeights, process_group: ProcessGroup, held: HeldWeights | None = None
) -> int:
    """Write weights into the blocks that a rank wants, `target`; see `send_weights`.

    Returns:
        Policy version of the weights; `NO_VERSION` for a rank that wants no element of any.

    Raises:
        RuntimeError: What arrived is not what was sent, or not of one policy version.
    """
    rooms = {name: (weight.local, weight.block) for name, weight in target.weights.items()}
    delivery = _Delivery(route, held, process_group)
    for _ in delivery.deliver(lambda _: rooms):
        pass
    return delivery.version()


def receive_weights(
    route: WeightRoute, process_group: ProcessGroup, takers: ProcessGroup, held: HeldWeights | None = None
) -> WeightStream:
    """Receive whole weights on all `takers`, on the device that moves payload; see `send_weights`.

    If something was damaged or mixed, no more weights come, and the end of the stream is a RuntimeError.
    """
    if process_group.size == 1:  # what this rank wants is what it holds
        assert held is not None
        local = ((name, held.weights[name].local.to(route.dtype)) for name in route.shapes)
        return WeightStream(local, held.policy_version)
    # The policy version arrives with the weights, so the gathering writes it into the stream that it fills.
    gathering = _Gathering(_Delivery(route, held, process_group), takers)
    stream = gathering.stream = WeightStream(gathering.weights())
    return stream


Rooms = Mapping[str, tuple[Tensor, WeightBlock]]
"""Memory for weights, by name, and the block that it holds."""


class _Found(NamedTuple):
    """Findings about messages of weights: [2, n] int64 versions, and 1 where the checksum matches."""

    senders: Sequence[int]
    names: str
    versions_and_matches: Tensor


class _Delivery:
    """The first leg: each rank receives its blocks from the ranks that hold them."""

    def __init__(self, route: WeightRoute, held: HeldWeights | None, process_group: ProcessGroup) -> None:
        self.route, self.held = route, held
        self.group, self.device = process_group, process_group.payload_device
        self.what = route.what
        self.versions: set[int] = set()
        # The first problem. It is raised after the last message, or ranks that exchange with this one would wait in
        # vain.
        self.error = ""
        self._unread: list[_Found] = []
        self._is_well: Tensor | None = None  # of the messages that the host has not read about
        if held is not None:
            self._check_placement(held)

    def _check_placement(self, held: HeldWeights) -> None:
        route = self.route
        for name, shape in route.shapes.items():
            # What each message holds follows from the route on both sides: weights in another place would be sent as if
            # they were right, under a checksum that matches.
            weight, expected = held.weights[name], route.holders.block(name, shape, route.rank)
            if weight.shape != shape or (weight.block != expected and expected.numel):
                raise RuntimeError(
                    f"rank {route.rank}: holds {weight.block} of '{name}' {weight.shape}, of {route.what}, but "
                    f"others expect {expected} of {shape}: correct the placement of its back end"
                )

    def deliver(self, open_rooms: Callable[[Sequence[RouteTurn]], Rooms]) -> Iterator[Sequence[RouteTurn]]:
        """Send and receive bucket after bucket into rooms; yields each that is there, while the next is sent."""
        under_way: deque[tuple[Sequence[RouteTurn], Rooms, list[tuple[int, Sequence[WeightPiece], Tensor]]]] = deque()

        def rounds() -> Iterator[Round]:
            most_bytes = bucket_bytes(self.device)
            for turns, leg in zip(self.route.buckets(most_bytes), self.route.legs(most_bytes), strict=True):
                # Memory for a bucket is taken when its round begins, so that there is never more than for the rounds
                # in progress.
                rooms = open_rooms(turns)
                self._copy_own(leg.own, rooms)
                arriving = [(sender, pieces, self._message(pieces)) for sender, pieces in leg.received.items()]
                under_way.append((turns, rooms, arriving))
                yield (
                    [(receiver, self._pack(pieces)) for receiver, pieces in leg.sent.items()],
                    [(sender, message) for sender, _, message in arriving],
                )

        for _ in self.group.exchanging(rounds(), self.what):
            turns, rooms, arrived = under_way.popleft()
            self._take(arrived, rooms)
            del arrived, rooms  # or they would stay while the next rounds are begun
            yield turns

    def _copy_own(self, pieces: Sequence[WeightPiece], rooms: Rooms) -> None:
        for piece in pieces:
            assert self.held is not None
            self.versions.add(self.held.policy_version)
            weight, (room, block) = self.held.weights[piece.name], rooms[piece.name]
            piece.block.view(room, block).copy_(piece.block.view(weight.local, weight.block))

    def _message(self, pieces: Sequence[WeightPiece]) -> Tensor:
        """Memory for a message: its pieces, then the policy version and a checksum."""
        num_bytes = sum(piece.block.numel for piece in pieces) * self.route.dtype.itemsize
        return torch.empty(round_up(num_bytes) + TRAILER, dtype=torch.uint8, device=self.device)

    def _parts(self, message: Tensor, pieces: Sequence[WeightPiece]) -> Iterator[tuple[WeightPiece, Tensor]]:
        begin, dtype = 0, self.route.dtype
        for piece in pieces:
            end = begin + piece.block.numel * dtype.itemsize
            yield piece, message[begin:end].view(dtype).view(piece.block.sizes)
            begin = end

    def _pack(self, pieces: Sequence[WeightPiece]) -> Tensor:
        assert self.held is not None
        message = self._message(pieces)
        for piece, place in self._parts(message, pieces):
            weight = self.held.weights[piece.name]
            place.copy_(piece.block.view(weight.local, weight.block))
        seal(message, self.held.policy_version)
        return message

    def _take(self, arrived: Sequence[tuple[int, Sequence[WeightPiece], Tensor]], rooms: Rooms) -> None:
        # All messages are checked before any is used: on a CPU nothing damaged is written. An accelerator is asked at
        # the end, and until then no check holds up the copies.
        for sender, pieces, message in arrived:
            self.check([sender], *_read_seal(message[None]), _between([piece.name for piece in pieces]))
        if not self.error:
            for _, pieces, message in arrived:
                for piece, value in self._parts(message, pieces):
                    piece.block.view(*rooms[piece.name]).copy_(value)

    def check(self, senders: Sequence[int], versions: Tensor, is_intact: Tensor, names: str) -> None:
        """Note what is wrong with messages of weights with these names.

        Versions are [n] int64, and `is_intact` [n] says whether checksums match. From an accelerator the host reads
        both at once until it knows a version; from then on it reads them together, after the last message.
        """
        # Until a version is known the host reads each message: the user of the stream needs the version with the first
        # weight, and later messages are compared with it on the device.
        found = _Found(senders, names, torch.stack([versions, is_intact.to(versions.dtype)]))
        if not (_is_read_late(self.device) and self.versions):
            self._read([found])
            return
        self._unread.append(found)
        known = next(iter(self.versions))
        is_well = (is_intact & ((versions == known) | (versions == NO_VERSION))).all()
        self._is_well = is_well if self._is_well is None else self._is_well & is_well

    @property
    def state(self) -> int | Tensor:
        """News for other ranks: the policy version, or that something is wrong, as far as the device knows."""
        if self.error:
            return IN_ERROR
        version = next(iter(self.versions), NO_VERSION)
        # On an accelerator the answer stays a tensor there: the next message carries it, and the host need not wait.
        return version if self._is_well is None else torch.where(self._is_well, version, IN_ERROR)

    def _read(self, found: Sequence[_Found]) -> None:
        """Note what is wrong with some messages; an accelerator has finished with all of them then."""
        self.group.backlog.wait()  # or a rank that is missing would have no name
        versions, are_intact = torch.cat([one.versions_and_matches for one in found], dim=1).tolist()
        about = ((sender, one.names) for one in found for sender in one.senders)
        for (sender, names), version, intact in zip(about, versions, are_intact, strict=True):
            # First the checksum: a damaged message has no version to trust.
            if not intact:
                self._note(f"from rank {sender} arrived damaged: the checksum of {names} does not match")
            elif version == IN_ERROR:
                self._note(f"did not reach rank {sender} well, whose error says why")
            elif version != NO_VERSION:
                self.versions.add(version)
        if len(self.versions) > 1:
            several = " and ".join(map(str, sorted(self.versions)))
            self._note(f"are of policy versions {several}: the ranks that train it are not at the same update")

    def _note(self, problem: str) -> None:
        # The first problem is the cause; others follow from it.
        self.error = self.error or f"rank {self.route.rank}: {self.what} {problem}"

    def version(self) -> int:
        """The policy version of the weights that have arrived; raises if anything was wrong with them."""
        if self._unread:
            self._read(self._unread)
            self._unread.clear()
        if self.error:
            raise RuntimeError(self.error)
        return next(iter(self.versions), NO_VERSION)


class _Gathering:
    """The second leg: ranks that have received their rows of whole weights gather the rows of all of them."""

    stream: WeightStream

    def __init__(self, delivery: _Delivery, takers: ProcessGroup) -> None:
        self._delivery, self._takers, self._route = delivery, takers, delivery.route
        self._whole: dict[str, Tensor] = {}
        self._parts: deque[Tensor] = deque()
        held = delivery.held
        # Weights that are not sent come in no message that has a version.
        if held is not None and self._route.local:
            delivery.versions.add(held.policy_version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, while the next buckets are on their way."""
        under_way: deque[tuple[Sequence[RouteTurn], PendingMessage | None]] = deque()
        for turns in self._delivery.deliver(self._open_rooms):
            under_way.append((turns, self._gather()))
            # What needs no gathering is complete, and would only take memory.
            while under_way and (under_way[0][1] is None or len(under_way) == GATHERS_AHEAD):
                yield from self._finish(*under_way.popleft())
        while under_way:
            yield from self._finish(*under_way.popleft())
        # Only now: an error may end the stream when all ranks have taken part in all messages.
        self._delivery.version()

    def _open_rooms(self, turns: Sequence[RouteTurn]) -> Rooms:
        """Memory for this rank's rows of a bucket: a single taker's are at once where they belong."""
        sent = [turn for turn in turns if turn.name not in self._route.local]
        shapes, device = self._route.shapes, self._delivery.device
        if self._takers.size == 1:
            for turn in sent:
                if turn.first == 0:
                    self._whole[turn.name] = torch.empty(shapes[turn.name], dtype=self._route.dtype, device=device)
            return {turn.name: (self._whole[turn.name], whole_block(shapes[turn.name])) for turn in sent}
        size = sum(math.prod(self._shape(turn)) for turn in sent) * self._route.dtype.itemsize
        # Rows arrive in the memory from which they are gathered, with room for the seal behind them: no copy between.
        part = torch.empty(round_up(size) + TRAILER, dtype=torch.uint8, device=device)
        self._parts.append(part)
        rooms: dict[str, tuple[Tensor, WeightBlock]] = {}
        for turn, view in self._views(part[None], sent):
            block = self._route.receivers.block(turn.name, shapes[turn.name], self._route.rank)
            block = block.rows(turn.first, turn.last)
            # A rank with fewer rows than others leaves the end unused, since a gather wants equal sizes.
            rooms[turn.name] = view[0, : block.sizes[0]], block
        return rooms

    def _shape(self, turn: RouteTurn) -> tuple[int, ...]:
        """Rows of a turn on the rank that has most of them."""
        return turn.last - turn.first, *self._route.shapes[turn.name][1:]

    def _views(self, parts: Tensor, turns: Sequence[RouteTurn]) -> Iterator[tuple[RouteTurn, Tensor]]:
        """The rows of each turn, [ranks, rows, ...], in the parts of ranks, [ranks, bytes] uint8."""
        begin, dtype = 0, self._route.dtype
        for turn in turns:
            shape = self._shape(turn)
            end = begin + math.prod(shape) * dtype.itemsize
            yield turn, parts[:, begin:end].view(dtype).view(len(parts), *shape)
            begin = end

    def _gather(self) -> PendingMessage | None:
        """Begin to gather the bucket that has arrived."""
        if not self._parts:
            return None
        part, delivery = self._parts.popleft(), self._delivery
        # Nothing of this bucket is sent. All ranks skip it, as that follows from the route.
        if len(part) == TRAILER:
            return None
        # A rank in error gathers all the same, and says so in place of a version; else the others would wait for it.
        seal(part, delivery.state)
        return self._takers.gather_equal(part, delivery.what)

    def _finish(self, turns: Sequence[RouteTurn], pending: PendingMessage | None) -> Iterator[tuple[str, Tensor]]:
        """Put rows where they belong, and yield the weights that are complete."""
        delivery, local = self._delivery, self._route.local
        if pending is not None:
            parts = pending.wait()
            delivery.check(self._takers.ranks, *_read_seal(parts), _between([turn.name for turn in turns]))
            for turn, rows in self._views(parts, [turn for turn in turns if turn.name not in local]):
                self._place(turn, rows)
        self.stream.policy_version = next(iter(delivery.versions), NO_VERSION)
        # Whoever uses a weight may wait for the device, and would not notice that a rank is missing. Later messages are
        # on their way meanwhile.
        delivery.group.backlog.wait()
        for turn in turns:
            if turn.is_last and not delivery.error:
                if turn.name in local:
                    assert delivery.held is not None
                    yield turn.name, delivery.held.weights[turn.name].local.to(self._route.dtype)
                else:
                    yield turn.name, self._whole.pop(turn.name)

    def _place(self, turn: RouteTurn, rows: Tensor) -> None:
        """Copy rows [ranks, rows, ...] of a turn into the whole weight, in which each rank's follow one another."""
        shape, num_rows = self._route.shapes[turn.name], self._route.rows(turn.name)
        if turn.first == 0:
            self._whole[turn.name] = rows.new_empty(shape)
        whole = self._whole[turn.name]
        # The first `full` ranks have `num_rows` rows each, and the next rank has the rest: one copy for all of the
        # former, and one for the latter.
        full = shape[0] // num_rows
        divided = whole[: full * num_rows].view(full, num_rows, *shape[1:])
        divided[:, turn.first : turn.last].copy_(rows[:full])
        rest = whole[full * num_rows :][turn.first : turn.last]
        if len(rest):
            rest.copy_(rows[full, : len(rest)])


def round_up(num_bytes: int) -> int:
    """A number of bytes that is whole words of a checksum."""
    return -(-num_bytes // WORD) * WORD


def seal(message: Tensor, version: int | Tensor) -> None:
    """Write a policy version and a checksum of all before it to the end of [bytes] uint8."""
    words = message.view(torch.int64)
    # The version first: the checksum covers it.
    words[-2] = version
    words[-1:] = checksums(message[None, :-WORD])


def _read_seal(messages: Tensor) -> tuple[Tensor, Tensor]:
    """The policy version of each message, [n] int64, and whether its checksum matches; messages are [n, bytes]."""
    words = messages.view(torch.int64)
    return words[:, -2], checksums(messages[:, :-WORD]) == words[:, -1]


def _is_read_late(device: torch.device) -> bool:
    """Whether the host would wait for a device to know whether a checksum matches."""
    return device.type != "cpu"


def _between(names: Sequence[str]) -> str:
    """The first and the last of some weights."""
    return f"'{names[0]}'" if names[0] == names[-1] else f"'{names[0]}' to '{names[-1]}'"
