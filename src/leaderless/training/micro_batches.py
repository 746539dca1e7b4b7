"""A rank's samples in pieces that fit into memory. How they are cut changes no number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.data.errors import MemoryExhausted
from leaderless.data.transport import Group


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed one behind the other, for one forward pass.

    Attributes:
        tokens: [T] int64, prompt and continuation of each sample.
        positions: [T] int64, place of each token in its sample.
        lengths: Tokens of each sample.
        select: [R] int64, the tokens at which the sampled tokens are predicted: the one before each.
        targets: [R] int64, the sampled tokens.
        response_index: [R] int64, where these tokens are in the batch's `response_tokens` columns.
        response_lengths: [m] int64, how many of them each sample has.
    """

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    select: Tensor
    targets: Tensor
    response_index: Tensor
    response_lengths: Tensor

    @classmethod
    def empty(cls) -> MicroBatch:
        """One token that nothing is asked about: it lets a rank without samples take part in a pass."""
        none = torch.empty(0, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        return cls(one, one, [1], none, none, none, torch.zeros(1, dtype=torch.int64))


class PassExhausted(MemoryExhausted):
    """A micro-batch was too large for memory.

    Attributes:
        num_tokens: That it has.
    """

    def __init__(self, micro_batch: MicroBatch, rank: int, device: torch.device, reason: str) -> None:
        """Say which.

        Args:
            micro_batch: That was too large.
            rank: Where.
            device: Whose memory has run out.
            reason: What the allocator says.
        """
        lengths = micro_batch.lengths
        self.num_tokens = sum(lengths)
        super().__init__(
            f"rank {rank}: a micro-batch of {self.num_tokens:,} tokens in {len(lengths):,} samples, the longest of "
            f"{max(lengths):,}, does not fit into the memory of {device} ({reason})"
        )


def longest_sample(batch: Batch) -> int:
    """Tokens of the longest sample, prompt and continuation; 0 without any.

    Args:
        batch: Has `prompt_tokens` and `tokens`.
    """
    lengths = batch.jagged("prompt_tokens").lengths + batch.jagged("tokens").lengths
    return int(lengths.max()) if len(lengths) else 0


def make_micro_batches(batch: Batch, max_tokens: int, group: Group) -> list[MicroBatch]:
    """Cut a batch into as many micro-batches on every rank, each of at most so many tokens.

    Samples of similar length come together. A rank with fewer micro-batches than others gets empty ones, so that all
    take part in the same number of passes.

    Args:
        batch: Has `prompt_tokens`, `tokens` and `response_mask`; may have no rows.
        max_tokens: Of one micro-batch; at least the longest sample's.
        group: The ranks that pass through the model together.
    """
    prompts, continuations = batch.jagged("prompt_tokens"), batch.jagged("tokens")
    mask = batch.jagged("response_mask")
    lengths = prompts.lengths + continuations.lengths
    pieces = _cut(lengths, max_tokens)
    count = int(group.max(torch.tensor([len(pieces)]), "the number of micro-batches"))
    micro_batches = [_pack(prompts, continuations, mask, torch.tensor(piece)) for piece in pieces]
    return micro_batches + [MicroBatch.empty()] * (count - len(micro_batches))


def response_lengths(mask: Jagged) -> Tensor:
    """How many tokens of each sample the policy sampled.

    Args:
        mask: The column `response_mask`.

    Returns:
        [n] int64.
    """
    total = torch.cat([torch.zeros(1, dtype=torch.int64), mask.values.long().cumsum(0)])
    return total[mask.offsets[1:]] - total[mask.offsets[:-1]]


def _cut(lengths: Tensor, max_tokens: int) -> list[list[int]]:
    """Rows of each piece: longest first, as many as fit."""
    pieces: list[list[int]] = []
    filled = max_tokens
    for row in torch.argsort(lengths, descending=True, stable=True).tolist():
        length = int(lengths[row])
        if filled + length > max_tokens:
            pieces.append([])
            filled = 0
        pieces[-1].append(row)
        filled += length
    return pieces


def _pack(prompts: Jagged, continuations: Jagged, mask: Jagged, rows: Tensor) -> MicroBatch:
    """One micro-batch of some rows."""
    before, after = prompts.lengths[rows], continuations.lengths[rows]
    lengths = before + after
    starts = lengths.cumsum(0) - lengths
    tokens = torch.empty(int(lengths.sum()), dtype=torch.int64)
    tokens[ragged_index(starts, before)] = prompts.select(rows).values
    continuation_index = ragged_index(starts + before, after)
    continuation = continuations.select(rows).values
    tokens[continuation_index] = continuation
    sampled = mask.select(rows).values
    counts = response_lengths(mask)
    offsets = counts.cumsum(0) - counts
    return MicroBatch(
        tokens=tokens,
        positions=ragged_index(torch.zeros_like(lengths), lengths),
        lengths=lengths.tolist(),
        select=continuation_index[sampled] - 1,
        targets=continuation[sampled],
        response_index=ragged_index(offsets[rows], counts[rows]),
        response_lengths=counts[rows],
    )
