"""New weights from the ranks that train a role to those that serve a copy of it.

Each rank sends the rows that it holds of every weight straight to the ranks that hold these rows of the copy. Every
byte is sent once, and none passes through a third rank.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leaderless.config import RecipeError
from leaderless.data.transport import ROUNDS_AHEAD, ProcessGroup, Round
from leaderless.models.decoder import Decoder
from leaderless.planner import SyncWeights
from leaderless.training.engine import Trainable
from leaderless.training.sharded import ShardedModel

BUCKET_BYTES = 1 << 25
"""Bytes of a bucket. At most two are sent and two received at a time, so a rank needs memory for four at most."""
_ELEMENT_BYTES = 4
"""Master weights and their copies are float32."""
_TRAILER_BYTES = 16


@dataclass(frozen=True)
class RowRange:
    """Rows of one weight.

    Attributes:
        index: Place of the weight in the order of `named_weights`.
        first: First row.
        last: Row after the last one.
    """

    index: int
    first: int
    last: int


@dataclass(frozen=True)
class WeightCopy:
    """The part that a rank holds of all weights, copied to host memory, with the shapes of the whole weights."""

    local: Sequence[Tensor]
    shapes: Sequence[torch.Size]
    policy_version: int

    @classmethod
    def of(cls, engine: Trainable, role: str) -> WeightCopy:
        """Copy the weights of a role's engine as they are now."""
        sharded = _sharded(engine, role)
        assert sharded is not None, "an engine has weights"
        weights = [parameter for _, parameter in sharded.named_weights()]
        local = [_local(parameter).to("cpu", copy=True) for parameter in weights]
        return cls(local, [parameter.shape for parameter in weights], sharded.policy_version)


WeightBucket = Sequence[RowRange]
"""Rows of consecutive weights that are sent together."""


def sync_weights(
    action: SyncWeights,
    process_group: ProcessGroup,
    source: Trainable | WeightCopy | None,
    target: Trainable | None,
) -> None:
    """Make a serving copy equal to the trained weights.

    All ranks of both layouts, which are the process group, call it together: those that train the role with the trained
    instance as source, those that serve it with the copy as target.

    Raises:
        RuntimeError: What arrived is not what was sent, or not of one policy version.
        RecipeError: The training back end divides weights in another way than `fsdp`.
    """
    given = source if isinstance(source, WeightCopy) else _sharded(source, action.role)
    taken = _sharded(target, action.role)
    sync = _Sync(action, process_group.rank, given, taken)
    process_group.exchange_rounds(sync.rounds(), f"weights of role '{action.role}'")
    sync.take_arrived(0)
    if taken is None:
        return
    if len(sync.versions) != 1:
        found = " and ".join(map(str, sorted(sync.versions))) or "unknown"
        raise RuntimeError(
            f"rank {process_group.rank}: weights of role '{action.role}' are of policy versions {found}: "
            "the ranks that train it are not at the same update"
        )
    taken.policy_version = sync.versions.pop()


class _Sync:
    """The part of one rank in an update of weights."""

    def __init__(
        self,
        action: SyncWeights,
        rank: int,
        source: ShardedModel[Decoder] | WeightCopy | None,
        target: ShardedModel[Decoder] | None,
    ) -> None:
        engine = source or target
        assert engine is not None
        self._role, self._rank = action.role, rank
        self._sources, self._targets = action.source_layout.ranks, action.target_layout.ranks
        if isinstance(engine, WeightCopy):
            self._shapes = list(engine.shapes)
        else:
            self._shapes = [parameter.shape for _, parameter in engine.named_weights()]
        if isinstance(source, WeightCopy):
            self._given: Sequence[Tensor] | None = source.local
        else:
            self._given = [_local(parameter) for _, parameter in source.named_weights()] if source else None
        self._taken = [_local(parameter) for _, parameter in target.named_weights()] if target else None
        self._version = source.policy_version if source else 0
        self._arriving: deque[list[tuple[int, WeightBucket, Tensor]]] = deque()
        self.versions: set[int] = set()

    def rounds(self) -> Iterator[Round]:
        """What this rank sends and receives of each bucket."""
        for bucket in _buckets(self._shapes):
            self.take_arrived(ROUNDS_AHEAD - 1)
            sent = self._shared(bucket, self._sources, self._targets) if self._given is not None else {}
            wanted = self._shared(bucket, self._targets, self._sources) if self._taken is not None else {}
            self._copy_own(sent.pop(self._rank, ()))
            wanted.pop(self._rank, None)
            self._arriving.append([(sender, rows, _buffer(rows, self._shapes)) for sender, rows in wanted.items()])
            yield (
                [(receiver, self._pack(rows)) for receiver, rows in sent.items()],
                [(sender, buffer) for sender, _, buffer in self._arriving[-1]],
            )

    def take_arrived(self, num_left: int) -> None:
        """Write the rows of all rounds where they belong, except the last `num_left`, which are still under way."""
        while len(self._arriving) > num_left:
            for sender, rows, message in self._arriving.popleft():
                self.versions.add(self._unpack(sender, rows, message))

    def _shared(self, bucket: WeightBucket, ranks: Sequence[int], others: Sequence[int]) -> dict[int, WeightBucket]:
        """The rows of a bucket that this rank of a layout has in common with ranks of the other layout."""
        shared: dict[int, list[RowRange]] = {}
        for rows in bucket:
            num_rows = self._shapes[rows.index][0]
            first, last = _rows_of(num_rows, ranks, self._rank)
            first, last = max(first, rows.first), min(last, rows.last)
            size = max(1, -(-num_rows // len(others)))
            for place in range(first // size, -(-last // size)):
                part = RowRange(rows.index, max(first, place * size), min(last, (place + 1) * size))
                if part.first < part.last:
                    shared.setdefault(others[place], []).append(part)
        return dict(shared)

    def _views(self, held: Sequence[Tensor] | None, rows: WeightBucket, ranks: Sequence[int]) -> Iterator[Tensor]:
        """Rows in the memory of this rank's weights."""
        assert held is not None
        for part in rows:
            offset, _ = _rows_of(self._shapes[part.index][0], ranks, self._rank)
            yield held[part.index][part.first - offset : part.last - offset]

    def _copy_own(self, rows: WeightBucket) -> None:
        """Copy the rows that this rank both trains and serves."""
        if not rows:
            return
        self.versions.add(self._version)
        taken = self._views(self._taken, rows, self._targets)
        for value, place in zip(self._views(self._given, rows, self._sources), taken, strict=True):
            place.copy_(value)

    def _pack(self, rows: WeightBucket) -> Tensor:
        """Rows as bytes, then the policy version and a checksum."""
        message = _buffer(rows, self._shapes)
        places = _parts(message, rows, self._shapes)
        for value, place in zip(self._views(self._given, rows, self._sources), places, strict=True):
            place.copy_(value)
        checksum = zlib.crc32(message[:-_TRAILER_BYTES].numpy().data)
        message[-_TRAILER_BYTES:] = torch.tensor([self._version, checksum], dtype=torch.int64).view(torch.uint8)
        return message

    def _unpack(self, sender: int, rows: WeightBucket, message: Tensor) -> int:
        """Write rows where they belong; returns the policy version that came with them."""
        version, checksum = message[-_TRAILER_BYTES:].clone().view(torch.int64).tolist()
        payload = message[:-_TRAILER_BYTES]
        if zlib.crc32(payload.numpy().data) != checksum:
            raise RuntimeError(
                f"rank {self._rank}: weights of role '{self._role}' from rank {sender} arrived damaged: "
                f"the checksum of {len(payload)} bytes does not match"
            )
        places = self._views(self._taken, rows, self._targets)
        for value, place in zip(_parts(message, rows, self._shapes), places, strict=True):
            place.copy_(value)
        return int(version)


def _sharded(engine: Trainable | None, role: str) -> ShardedModel[Decoder] | None:
    if engine is None or isinstance(engine, ShardedModel):
        return engine
    raise RecipeError.at(
        f"models.{role}",
        "is trained and used on different ranks, which only the back end fsdp can do: set training.backend=fsdp, or "
        "give all nodes of the role one layout",
    )


def _local(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _buckets(shapes: Sequence[torch.Size]) -> Iterator[WeightBucket]:
    """All rows of all weights in their order, as many at a time as fill a bucket."""
    bucket: list[RowRange] = []
    room = BUCKET_BYTES
    for index, shape in enumerate(shapes):
        row_bytes, first = shape[1:].numel() * _ELEMENT_BYTES, 0
        while first < shape[0]:
            if bucket and room < row_bytes:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            last = min(shape[0], first + max(1, room // row_bytes))
            bucket.append(RowRange(index, first, last))
            room -= (last - first) * row_bytes
            first = last
    if bucket:
        yield bucket


def _rows_of(num_rows: int, ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """The rows of a weight that a rank holds, as FSDP cuts them: equal parts rounded up, the last ones shorter."""
    size = -(-num_rows // len(ranks))
    first = min(ranks.index(rank) * size, num_rows)
    return first, min(first + size, num_rows)


def _buffer(rows: WeightBucket, shapes: Sequence[torch.Size]) -> Tensor:
    """Memory for a message."""
    num_elements = sum((part.last - part.first) * shapes[part.index][1:].numel() for part in rows)
    return torch.empty(num_elements * _ELEMENT_BYTES + _TRAILER_BYTES, dtype=torch.uint8)


def _parts(message: Tensor, rows: WeightBucket, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """The rows in a message."""
    begin = 0
    for part in rows:
        shape = (part.last - part.first, *shapes[part.index][1:])
        end = begin + torch.Size(shape).numel() * _ELEMENT_BYTES
        yield message[begin:end].view(torch.float32).view(shape)
        begin = end
