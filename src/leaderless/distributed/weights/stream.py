"""The weights of a role on the way from the ranks that hold them to those that use them.

A rank that finds an error takes part to the end, so that no other one is left waiting, and raises it then. An
accelerator compares checksums by itself, and after the last message the host reads what it has found, all at once: to
wait for it after each message would stop the next ones. No stream that was damaged ends without the error.

    bucket 1   sent    gathered    used
    bucket 2           sent        gathered    used
    bucket 3                       sent        gathered    used
    time       ------------------------------------------------>

A bucket is sent from its holders to ranks that each want a part of it. Where all of these want everything, they gather
the parts, and use whole weights while the next buckets are on their way. Where the holders send differences, so do
ranks that have all weights from before: each finds anew which of its numbers in a bucket differ from these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from leaderless.distributed.in_flight import PendingMessage
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import HeldWeights, WeightBlock, whole_block
from leaderless.distributed.weights.delivery import Rooms, WeightDelivery, between, read_seal, seal
from leaderless.distributed.weights.differences import TRAILER, apply, difference, round_up
from leaderless.distributed.weights.route import RouteTurn, WeightRoute
from leaderless.distributed.weights.sent import NO_VERSION

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
    delivery = WeightDelivery(route, held, process_group)
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
    delivery = WeightDelivery(route, held, process_group)
    for _ in delivery.deliver(lambda _: rooms):
        pass
    return delivery.version()


def receive_weights(
    route: WeightRoute,
    process_group: ProcessGroup,
    takers: ProcessGroup,
    held: HeldWeights | None = None,
    base: HeldWeights | None = None,
) -> WeightStream:
    """Receive whole weights on all `takers`, on the device that moves payload; see `send_weights`.

    With `base`, the weights that came last in the type of the route, they may come as differences. Each of these is
    read, and kept, until the stream yields its successor. On all takers alike, the base is whole, or the rows that each
    receives from the holders: then takers gather all numbers, and not differences.

    If something was damaged or mixed, no more weights come, and the end of the stream is a RuntimeError.
    """
    if process_group.size == 1:  # what this rank wants is what it holds
        assert held is not None
        local = ((name, held.weights[name].local.to(route.dtype)) for name in route.shapes)
        return WeightStream(local, held.policy_version)
    # The policy version arrives with the weights, so the gathering writes it into the stream that it fills.
    gathering = _Gathering(WeightDelivery(route, held, process_group, base), takers)
    stream = gathering.stream = WeightStream(gathering.weights())
    return stream


class _Gathering:
    """The second leg: ranks that have received their rows of whole weights gather the rows of all of them."""

    stream: WeightStream

    def __init__(self, delivery: WeightDelivery, takers: ProcessGroup) -> None:
        self._delivery, self._takers, self._route = delivery, takers, delivery.route
        self._whole: dict[str, Tensor] = {}
        self._parts: deque[Tensor] = deque()
        self._has_whole_base = all(one.block == whole_block(one.shape) for one in delivery.base.values())
        held = delivery.held
        # Weights that are not sent come in no message that has a version.
        if held is not None and self._route.local:
            delivery.versions.add(held.policy_version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, while the next buckets are on their way."""
        under_way: deque[tuple[Sequence[RouteTurn], PendingMessage | None]] = deque()
        for turns in self._delivery.deliver(self._open_rooms):
            under_way.append((turns, self._gather(turns)))
            # What needs no gathering is complete, and would only take memory.
            while under_way and (under_way[0][1] is None or len(under_way) == GATHERS_AHEAD):
                yield from self._finish(*under_way.popleft())
        while under_way:
            yield from self._finish(*under_way.popleft())
        # Only now: an error may end the stream when all ranks have taken part in all messages.
        self._delivery.version()

    def _open_rooms(self, turns: Sequence[RouteTurn]) -> Rooms:
        """Memory for this rank's rows of a bucket: a single taker's are at once where they belong."""
        sent = self._sent(turns)
        shapes, device = self._route.shapes, self._delivery.device
        if self._takers.size == 1:
            for turn in sent:
                if turn.first == 0:
                    self._whole[turn.name] = torch.empty(shapes[turn.name], dtype=self._route.dtype, device=device)
            return {turn.name: (self._whole[turn.name], whole_block(shapes[turn.name])) for turn in sent}
        # Rows arrive in the memory from which they are gathered, with room for the seal behind them: no copy between.
        part = self._part(sent)
        self._parts.append(part)
        return self._rooms(part, sent, self._route.rank)

    def _part(self, turns: Sequence[RouteTurn]) -> Tensor:
        """Memory for one rank's rows of a bucket and a seal; of turns that are sent."""
        # Zeros where no rows are, so that nothing has changed there.
        return torch.zeros(self._part_bytes(turns), dtype=torch.uint8, device=self._delivery.device)

    def _part_bytes(self, turns: Sequence[RouteTurn]) -> int:
        size = sum(math.prod(self._shape(turn)) for turn in turns) * self._route.dtype.itemsize
        return round_up(size) + TRAILER

    def _rooms(self, part: Tensor, turns: Sequence[RouteTurn], rank: int) -> Rooms:
        """The rows of a rank in its part of a bucket, by weight."""
        rooms: dict[str, tuple[Tensor, WeightBlock]] = {}
        for turn, view in self._views(part[None], turns):
            block = self._route.receivers.block(turn.name, self._route.shapes[turn.name], rank)
            block = block.rows(turn.first, turn.last)
            # A rank with fewer rows than others leaves the end unused, since a gather wants equal sizes.
            rooms[turn.name] = view[0, : block.sizes[0]], block
        return rooms

    def _base_part(self, turns: Sequence[RouteTurn], rank: int) -> Tensor:
        """A rank's part of a bucket as it was in the weights before; without a seal."""
        part = self._part(turns)
        for name, (room, block) in self._rooms(part, turns, rank).items():
            before = self._delivery.base[name]
            room.copy_(block.view(before.local, before.block))
        return part

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

    def _gather(self, turns: Sequence[RouteTurn]) -> PendingMessage | None:
        """Begin to gather the bucket that has arrived."""
        if not self._parts:
            return None
        part, delivery = self._parts.popleft(), self._delivery
        # Nothing of this bucket is sent. All ranks skip it, as that follows from the route.
        if len(part) == TRAILER:
            return None
        # A rank in error gathers all the same, and says so in place of a version; else the others would wait for it.
        seal(part, delivery.state)
        if self._gathers_differences:
            part = self._shortened(part, self._sent(turns))
        return self._takers.gather_equal(part, delivery.what)

    @property
    def _gathers_differences(self) -> bool:
        return self._delivery.is_difference and self._has_whole_base

    def _sent(self, turns: Sequence[RouteTurn]) -> Sequence[RouteTurn]:
        """The turns that are sent."""
        return [turn for turn in turns if turn.name not in self._route.local]

    def _shortened(self, part: Tensor, turns: Sequence[RouteTurn]) -> Tensor:
        """A part as a difference, in as many bytes as the longest of all ranks; or as it is if one of them sends it so.

        All takers call it together.
        """
        base = self._base_part(turns, self._route.rank)
        message = difference(part, base[:-TRAILER], self._route.dtype.itemsize).message
        mine = len(part) if message is None else len(message)
        most = int(self._takers.max(torch.tensor([mine]), self._delivery.what))
        if message is None or most == len(part):
            return part
        return torch.cat([message, message.new_zeros(most - mine)])

    def _whole_parts(self, parts: Tensor, turns: Sequence[RouteTurn]) -> Tensor:
        """Parts of a bucket, [ranks, bytes] uint8, that may be differences, as a whole each."""
        if not self._gathers_differences or parts.shape[1] == self._part_bytes(turns):
            return parts
        whole = [self._base_part(turns, rank) for rank in self._takers.ranks]
        for part, message in zip(whole, parts, strict=True):
            apply(message, part, self._route.dtype.itemsize)
        return torch.stack(whole)

    def _finish(self, turns: Sequence[RouteTurn], pending: PendingMessage | None) -> Iterator[tuple[str, Tensor]]:
        """Put rows where they belong, and yield the weights that are complete."""
        delivery, local = self._delivery, self._route.local
        if pending is not None:
            sent = self._sent(turns)
            parts = self._whole_parts(pending.wait(), sent)
            delivery.check(self._takers.ranks, *read_seal(parts), between([turn.name for turn in turns]))
            for turn, rows in self._views(parts, sent):
                self._place(turn, rows)
        self.stream.policy_version = next(iter(delivery.versions), NO_VERSION)
        # Whoever uses a weight may wait for the device, and would not notice that a rank is missing. Later messages are
        # on their way meanwhile.
        delivery.group.backlog.wait()
        for turn in turns:
            if turn.is_last and not delivery.error:
                delivery.base.pop(turn.name, None)  # the user of the weight may free it now
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
