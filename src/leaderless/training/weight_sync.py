"""New weights from the ranks that train a role to those that serve a copy of it.

Each rank sends the rows that it holds of every weight straight to the ranks that hold these rows of the copy. Every
byte crosses once, and none passes through a third rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leaderless.data.transport import ProcessGroup
from leaderless.models.decoder import Decoder
from leaderless.planner import SyncWeights
from leaderless.training.sharded import ShardedModel

BUCKET_BYTES = 1 << 28
"""Weights travel in buckets of about this many bytes, so that no second copy of the model is needed."""


@dataclass(frozen=True)
class _Piece:
    """Rows of one weight that one rank has to give to another."""

    index: int
    first: int
    last: int


def sync_weights(
    action: SyncWeights,
    process_group: ProcessGroup,
    source: ShardedModel[Decoder] | None,
    target: ShardedModel[Decoder] | None,
) -> None:
    """Make a serving copy equal to the trained weights. All ranks of both layouts call it together.

    Args:
        action: The role, and where it is trained and served.
        process_group: The ranks of both layouts.
        source: The trained instance, on ranks that have it.
        target: The serving instance, on ranks that have it.

    Raises:
        RuntimeError: What arrived is not what was sent, or not of one policy version.
    """
    engine = source or target
    assert engine is not None
    shapes = [parameter.shape for _, parameter in engine.named_weights()]
    given = [_local(parameter) for _, parameter in source.named_weights()] if source else []
    taken = [_local(parameter) for _, parameter in target.named_weights()] if target else []
    version = source.policy_version if source else 0
    versions: set[int] = set()
    for bucket in _buckets(shapes):
        sources, targets = action.source_layout.ranks, action.target_layout.ranks
        sent = _pieces(shapes, bucket, process_group.rank, sources, targets) if source else {}
        expected = _pieces(shapes, bucket, process_group.rank, targets, sources) if target else {}
        messages = {
            receiver: _pack(given, pieces, shapes, action, process_group.rank, version)
            for receiver, pieces in sent.items()
        }
        own = messages.pop(process_group.rank, None)
        senders = [sender for sender in expected if sender != process_group.rank]
        arrived = process_group.exchange(messages, senders, f"weights of role '{action.role}'")
        for sender, message in (*arrived.items(), *([(process_group.rank, own)] if own is not None else ())):
            versions.add(_unpack(message, taken, expected[sender], shapes, action, process_group.rank, sender))
    if target is None:
        return
    if len(versions) != 1:
        found = " and ".join(map(str, sorted(versions))) or "unknown"
        raise RuntimeError(
            f"rank {process_group.rank}: weights of role '{action.role}' are of policy versions {found}: "
            "the ranks that train it are not at the same update"
        )
    target.policy_version = versions.pop()


def _local(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _buckets(shapes: Sequence[torch.Size]) -> Iterator[range]:
    """Consecutive weights, as many as fill a bucket."""
    begin = size = 0
    for index, shape in enumerate(shapes):
        size += shape.numel() * 4
        if size >= BUCKET_BYTES or index == len(shapes) - 1:
            yield range(begin, index + 1)
            begin, size = index + 1, 0


def _rows(num_rows: int, ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """The rows of a weight that a rank holds, as FSDP cuts them: equal pieces rounded up, the last ones shorter."""
    piece = -(-num_rows // len(ranks))
    first = min(ranks.index(rank) * piece, num_rows)
    return first, min(first + piece, num_rows)


def _pieces(
    shapes: Sequence[torch.Size], bucket: range, rank: int, ranks: Sequence[int], others: Sequence[int]
) -> dict[int, list[_Piece]]:
    """What one rank of a layout has in common with each rank of the other, of a bucket; only ranks that it meets."""
    pieces: dict[int, list[_Piece]] = {}
    for index in bucket:
        num_rows = shapes[index][0]
        first, last = _rows(num_rows, ranks, rank)
        size = max(1, -(-num_rows // len(others)))
        for place in range(first // size, -(-last // size)):
            piece = _Piece(index, max(first, place * size), min(last, (place + 1) * size))
            if piece.first < piece.last:
                pieces.setdefault(others[place], []).append(piece)
    return pieces


def _pack(
    given: Sequence[Tensor],
    pieces: Sequence[_Piece],
    shapes: Sequence[torch.Size],
    action: SyncWeights,
    rank: int,
    version: int,
) -> Tensor:
    """Rows as bytes, then the policy version and a checksum."""
    parts: list[Tensor] = []
    for piece in pieces:
        offset, _ = _rows(shapes[piece.index][0], action.source_layout.ranks, rank)
        rows = given[piece.index][piece.first - offset : piece.last - offset]
        parts.append(rows.contiguous().cpu().reshape(-1).view(torch.uint8))
    payload = torch.cat(parts)
    trailer = torch.tensor([version, zlib.crc32(payload.numpy().data)], dtype=torch.int64)
    return torch.cat([payload, trailer.view(torch.uint8)])


def _unpack(
    message: Tensor,
    taken: Sequence[Tensor],
    pieces: Sequence[_Piece],
    shapes: Sequence[torch.Size],
    action: SyncWeights,
    rank: int,
    sender: int,
) -> int:
    """Write rows where they belong; returns the policy version that came with them."""
    payload, trailer = message[:-16], message[-16:].clone().view(torch.int64)
    version, checksum = (int(number) for number in trailer)
    if zlib.crc32(payload.numpy().data) != checksum:
        raise RuntimeError(
            f"rank {rank}: weights of role '{action.role}' from rank {sender} arrived damaged: the checksum of "
            f"{len(payload)} bytes does not match"
        )
    begin = 0
    for piece in pieces:
        offset, _ = _rows(shapes[piece.index][0], action.target_layout.ranks, rank)
        rows = taken[piece.index][piece.first - offset : piece.last - offset]
        num_bytes = rows.numel() * rows.element_size()
        rows.copy_(payload[begin : begin + num_bytes].clone().view(rows.dtype).view(rows.shape))
        begin += num_bytes
    return version
