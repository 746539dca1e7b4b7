"""The first leg of weights: each rank receives its blocks from the ranks that hold them.

Every message ends with the policy version of its weights and a checksum, which the ranks that use them compare. If all
ranks of a route still have what was sent last, messages are differences from it (see `differences`), and each begins
with its size, which does not follow from the route then. The checksum is the one of the whole message in any case.

    message    pieces of weights | padding to a word | policy version | checksum of all before it
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.distributed.transport import ProcessGroup, Round
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, WeightBlock
from leaderless.distributed.weights.buckets import checksums
from leaderless.distributed.weights.differences import TRAILER, WORD, Difference, apply, difference, round_up
from leaderless.distributed.weights.route import RouteLeg, RouteTurn, WeightPiece, WeightRoute, bucket_bytes
from leaderless.distributed.weights.sent import NO_VERSION, MessagePlace, Traffic

IN_ERROR = -2
"""Version in the message of a rank that has found an error."""
Rooms = Mapping[str, tuple[Tensor, WeightBlock]]
"""Memory for weights, by name, and the block that it holds."""


Arriving = tuple[int, Sequence[WeightPiece], Tensor]
"""The sender of a message, its pieces, and memory for it."""


class Found(NamedTuple):
    """Findings about messages of weights: [2, n] int64 versions, and 1 where the checksum matches."""

    senders: Sequence[int]
    names: str
    versions_and_matches: Tensor


class WeightDelivery:
    """The first leg: each rank receives its blocks from the ranks that hold them.

    Attributes:
        base: Weights that this rank has received before, or its rows, until their successors are complete.
        is_difference: Whether messages may be differences from those of the version before; known once it begins.
    """

    def __init__(
        self,
        route: WeightRoute,
        held: HeldWeights | None,
        process_group: ProcessGroup,
        base: HeldWeights | None = None,
    ) -> None:
        """Send what this rank holds, and receive; `base` is what it has received before, if it has."""
        self.route, self.held = route, held
        self.base: dict[str, LocalWeight] = {} if base is None else {**base.weights}
        self._base_version = NO_VERSION if base is None else base.policy_version
        self.group, self.device = process_group, process_group.payload_device
        self.what = route.what
        self.versions: set[int] = set()
        # The first problem. It is raised after the last message, or ranks that exchange with this one would wait in
        # vain.
        self.error = ""
        self._unread: list[Found] = []
        self._is_well: Tensor | None = None  # of the messages that the host has not read about
        self.is_difference, self._width, self._traffic = False, route.dtype.itemsize, Traffic()
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
        begin, sent, held = time.monotonic(), self.route.sent, self.held
        under_way: deque[tuple[Sequence[RouteTurn], Rooms, Sequence[Arriving]]] = deque()
        most_bytes = bucket_bytes(self.device)
        buckets, legs = self.route.buckets(most_bytes), self.route.legs(most_bytes)
        self._begin_differences(legs)

        def rounds() -> Iterator[Round]:
            for number, (turns, leg) in enumerate(zip(buckets, legs, strict=True)):
                # Memory for a bucket is taken when its round begins, so that there is never more than for the rounds
                # in progress.
                rooms = open_rooms(turns)
                self._copy_own(leg.own, rooms)
                leaving = [(receiver, self._pack((number, receiver), pieces)) for receiver, pieces in leg.sent.items()]
                arriving = self._expect(leaving, leg.received)
                under_way.append((turns, rooms, arriving))
                yield leaving, [(sender, message) for sender, _, message in arriving]

        for _ in self.group.exchanging(rounds(), self.what):
            turns, rooms, arrived = under_way.popleft()
            self._take(arrived, rooms)
            del arrived, rooms  # or they would stay while the next rounds are begun
            yield turns
        if held is not None:
            self.route.traffic += self._traffic + Traffic(seconds=time.monotonic() - begin)
        if sent is not None and held is not None:
            sent.policy_version = held.policy_version

    def _begin_differences(self, legs: Sequence[RouteLeg]) -> None:
        """Find out whether all ranks have the same version from before, if differences may be sent at all."""
        sent = self.route.sent
        if sent is None:
            return
        versions = set[int]()
        if self.held is not None:
            versions.add(sent.policy_version)
            sent.policy_version = NO_VERSION  # until all of the next one is sent
            sizes = {
                (number, receiver): self._num_bytes(pieces)
                for number, leg in enumerate(legs)
                for receiver, pieces in leg.sent.items()
            }
            sent.open(sizes, self.device)
        if self.route.rank in self.route.takers.layout:
            versions.add(self._base_version)
        mine = versions.pop() if len(versions) == 1 else NO_VERSION
        # The negated version gives the lowest one, so that a single maximum compares all ranks. One that has started
        # again, or missed a version, gets the whole, and so do all, as some of them pass on what others get.
        highest, lowest = self.group.max(torch.tensor([mine, -mine]), self.what).tolist()
        self.is_difference = highest == -lowest != NO_VERSION

    def _copy_own(self, pieces: Sequence[WeightPiece], rooms: Rooms) -> None:
        for piece in pieces:
            assert self.held is not None
            self.versions.add(self.held.policy_version)
            weight, (room, block) = self.held.weights[piece.name], rooms[piece.name]
            piece.block.view(room, block).copy_(piece.block.view(weight.local, weight.block))

    def _num_bytes(self, pieces: Sequence[WeightPiece]) -> int:
        """Bytes of the numbers in a message, and of zeros after them, up to whole words."""
        return round_up(sum(piece.block.numel for piece in pieces) * self._width)

    def _message(self, pieces: Sequence[WeightPiece]) -> Tensor:
        """Memory for a whole message: its pieces, then zeros up to whole words, the policy version and a checksum."""
        message = torch.empty(self._num_bytes(pieces) + TRAILER, dtype=torch.uint8, device=self.device)
        message[-TRAILER - WORD : -TRAILER] = 0  # pieces are written over them
        return message

    def _parts(self, message: Tensor, pieces: Sequence[WeightPiece]) -> Iterator[tuple[WeightPiece, Tensor]]:
        begin = 0
        for piece in pieces:
            end = begin + piece.block.numel * self._width
            yield piece, message[begin:end].view(self.route.dtype).view(piece.block.sizes)
            begin = end

    def _pack(self, place: MessagePlace, pieces: Sequence[WeightPiece]) -> Tensor:
        """A message of pieces, or its difference from the one of before, if that has fewer bytes."""
        assert self.held is not None
        message, sent = self._filled(pieces, self.held.weights), self.route.sent
        seal(message, self.held.policy_version)
        if sent is None:
            self._traffic += Traffic(len(message), len(message))
            return message
        made = Difference(None, 0)
        if self.is_difference:
            made = difference(message, sent.numbers(place, self.device), self._width)
        sent.keep(place, message[:-TRAILER])
        leaving = message if made.message is None else made.message
        num_compared = sum(piece.block.numel for piece in pieces) * self.is_difference
        size = len(leaving) + WORD * self.is_difference
        self._traffic += Traffic(size, len(message), made.num_changed, num_compared)
        return leaving

    def _filled(self, pieces: Sequence[WeightPiece], weights: Mapping[str, LocalWeight]) -> Tensor:
        """A whole message of some weights, without an end."""
        message = self._message(pieces)
        for piece, place in self._parts(message, pieces):
            weight = weights[piece.name]
            place.copy_(piece.block.view(weight.local, weight.block))
        return message

    def _expect(
        self, leaving: Sequence[tuple[int, Tensor]], received: Mapping[int, Sequence[WeightPiece]]
    ) -> Sequence[Arriving]:
        """Memory for the messages of a bucket from other ranks; of differences, the senders say how long they are."""
        if not self.is_difference:
            return [(sender, pieces, self._message(pieces)) for sender, pieces in received.items()]
        sizes = {sender: torch.zeros(WORD, dtype=torch.uint8) for sender in received}
        lengths = [(receiver, torch.tensor([len(message)]).view(torch.uint8)) for receiver, message in leaving]
        self.group.exchange_rounds([(lengths, [*sizes.items()])], self.what)
        return [
            (sender, pieces, torch.empty(int(sizes[sender].view(torch.int64)), dtype=torch.uint8, device=self.device))
            for sender, pieces in received.items()
        ]

    def _take(self, arrived: Sequence[Arriving], rooms: Rooms) -> None:
        # All messages are checked before any is used: on a CPU nothing damaged is written. An accelerator is asked at
        # the end, and until then no check holds up the copies.
        messages = [(sender, pieces, self._whole(message, pieces)) for sender, pieces, message in arrived]
        for sender, pieces, message in messages:
            self.check([sender], *read_seal(message[None]), between([piece.name for piece in pieces]))
        if not self.error:
            for _, pieces, message in messages:
                for piece, value in self._parts(message, pieces):
                    piece.block.view(*rooms[piece.name]).copy_(value)

    def _whole(self, message: Tensor, pieces: Sequence[WeightPiece]) -> Tensor:
        """The whole of a message that may be a difference."""
        if len(message) == self._num_bytes(pieces) + TRAILER:
            return message
        whole = self._filled(pieces, self.base)
        apply(message, whole, self._width)
        return whole

    def check(self, senders: Sequence[int], versions: Tensor, is_intact: Tensor, names: str) -> None:
        """Note what is wrong with messages of weights with these names.

        Versions are [n] int64, and `is_intact` [n] says whether checksums match. From an accelerator the host reads
        both at once until it knows a version; from then on it reads them together, after the last message.
        """
        # Until a version is known the host reads each message: the user of the stream needs the version with the first
        # weight, and later messages are compared with it on the device.
        found = Found(senders, names, torch.stack([versions, is_intact.to(versions.dtype)]))
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

    def _read(self, found: Sequence[Found]) -> None:
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


def seal(message: Tensor, version: int | Tensor) -> None:
    """Write a policy version and a checksum of all before it to the end of [bytes] uint8."""
    words = message.view(torch.int64)
    # The version first: the checksum covers it.
    words[-2] = version
    words[-1:] = checksums(message[None, :-WORD])


def read_seal(messages: Tensor) -> tuple[Tensor, Tensor]:
    """The policy version of each message, [n] int64, and whether its checksum matches; messages are [n, bytes]."""
    words = messages.view(torch.int64)
    return words[:, -2], checksums(messages[:, :-WORD]) == words[:, -1]


def _is_read_late(device: torch.device) -> bool:
    """Whether the host would wait for a device to know whether a checksum matches."""
    return device.type != "cpu"


def between(names: Sequence[str]) -> str:
    """The first and the last of some weights."""
    return f"'{names[0]}'" if names[0] == names[-1] else f"'{names[0]}' to '{names[-1]}'"
