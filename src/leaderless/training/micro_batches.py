"""A rank's samples in parts that fit into memory. How they are cut changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.data.errors import MemoryExhausted
from leaderless.data.transport import ProcessGroup
from leaderless.models.shared_prompts import Family


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed one behind the other, for one forward pass; siblings share the tokens of their prompt.

    Of a sample there are the tokens up to the one before its last sampled token, which nothing is predicted from.

    Attributes:
        tokens: [T] int64, each prompt followed by its continuations.
        positions: [T] int64, place of each token in its sample.
        families: Lengths of each prompt and its continuations.
        select: [R] int64, the tokens at which the sampled tokens are predicted: the one before each. The last token of
            a prompt predicts the first of all continuations.
        targets: [R] int64, the sampled tokens.
        response_index: [R] int64, where these tokens are in the batch's `response_tokens` columns.
        response_lengths: [m] int64, how many of them each sample has.
    """

    tokens: Tensor
    positions: Tensor
    families: list[Family]
    select: Tensor
    targets: Tensor
    response_index: Tensor
    response_lengths: Tensor

    @classmethod
    def empty(cls) -> MicroBatch:
        """One token that nothing is asked about: it lets a rank without samples take part in a pass."""
        none = torch.empty(0, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        return cls(one, one, [Family(1, ())], none, none, none, torch.zeros(1, dtype=torch.int64))


class PassExhausted(MemoryExhausted):
    """A micro-batch was too large for memory.

    Attributes:
        num_tokens: Number of tokens that it has.
    """

    def __init__(self, micro_batch: MicroBatch, rank: int, device: torch.device, reason: str) -> None:
        """Say which.

        Args:
            micro_batch: Micro-batch that was too large.
            rank: Rank on which it was.
            device: Device whose memory has run out.
            reason: Message of the allocator.
        """
        self.num_tokens = len(micro_batch.tokens)
        longest = max(family.longest for family in micro_batch.families)
        super().__init__(
            f"rank {rank}: a micro-batch of {self.num_tokens:,} tokens in {len(micro_batch.response_lengths):,} "
            f"samples, the longest of {longest:,}, does not fit into the memory of {device} ({reason})"
        )


def longest_sample(batch: Batch) -> int:
    """Tokens that a pass takes for the longest sample, prompt and continuation; 0 without any.

    Args:
        batch: Samples with `prompt_tokens`, `tokens` and `response_mask`.
    """
    samples = _Samples.of(batch)
    lengths = samples.prompts.lengths[samples.prompt_of_row] + samples.inputs
    return int(lengths.max()) if len(lengths) else 0


def make_micro_batches(
    batch: Batch, max_tokens: int, process_group: ProcessGroup, enough_tokens: int | None = None
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of bounded size, the same number on every rank.

    Siblings come together as far as they fit, so that their prompt is computed once. A rank with fewer micro-batches
    than others gets empty ones, so that all take part in the same number of passes.

    Args:
        batch: Samples with `prompt_tokens`, `tokens` and `response_mask`; may have no rows.
        max_tokens: Largest number of tokens of a micro-batch; at least the longest sample's.
        process_group: The ranks that pass through the model together.
        enough_tokens: Number of tokens up to which samples of several prompts are put together; None for
            `max_tokens`.
    """
    samples = _Samples.of(batch)
    pieces = _fill(_families(samples, max_tokens), min(max_tokens, enough_tokens or max_tokens))
    count = int(process_group.max(torch.tensor([len(pieces)]), "the number of micro-batches"))
    micro_batches = [_pack(samples, piece) for piece in pieces]
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


@dataclass(frozen=True)
class _Samples:
    """What a batch holds for a pass.

    Attributes:
        prompts: Prompts, each once.
        prompt_of_row: [n] int64, the prompt of each sample.
        continuations: Tokens of each sample after its prompt.
        mask: True for tokens that the policy sampled.
        inputs: [n] int64, tokens of each continuation before the last one that was sampled.
        counts: [n] int64, sampled tokens of each.
    """

    prompts: Jagged
    prompt_of_row: Tensor
    continuations: Jagged
    mask: Jagged
    inputs: Tensor
    counts: Tensor

    @classmethod
    def of(cls, batch: Batch) -> _Samples:
        """Rows that bring prompts of their own share none."""
        prompts, prompt_of_row = batch.prompts, batch.prompt_index
        if prompts is None or prompt_of_row is None or "prompt_tokens" in batch.columns:
            prompts, prompt_of_row = batch, torch.arange(len(batch))
        mask = batch.jagged("response_mask")
        step = ragged_index(torch.zeros_like(mask.lengths), mask.lengths)
        row = torch.repeat_interleave(torch.arange(len(mask)), mask.lengths)
        inputs = torch.zeros_like(mask.lengths).scatter_reduce_(0, row, step * mask.values, reduce="amax")
        continuations = batch.jagged("tokens")
        return cls(prompts.jagged("prompt_tokens"), prompt_of_row, continuations, mask, inputs, response_lengths(mask))


@dataclass
class _Siblings:
    """Rows of one prompt, and the tokens that they take together."""

    rows: list[int]
    num_tokens: int


def _families(samples: _Samples, max_tokens: int) -> list[_Siblings]:
    """Siblings together, the longest first; in several parts where they do not fit into one micro-batch."""
    by_length = torch.argsort(samples.inputs, descending=True, stable=True)
    order = by_length[torch.argsort(samples.prompt_of_row[by_length], stable=True)]
    prompts, inputs = samples.prompt_of_row[order], samples.inputs[order]
    columns = (order, prompts, samples.prompts.lengths[prompts], inputs)
    families: list[_Siblings] = []
    first, last = 0, -1
    for row, prompt, before, after in zip(*(column.tolist() for column in columns), strict=True):
        if prompt != last:
            first, last = len(families), prompt
        room = (place for place in range(first, len(families)) if families[place].num_tokens + after <= max_tokens)
        place = next(room, None)
        if place is None:
            families.append(_Siblings([row], before + after))
        else:
            families[place].rows.append(row)
            families[place].num_tokens += after
    return families


def _fill(families: Sequence[_Siblings], enough_tokens: int) -> list[list[_Siblings]]:
    """What goes into each micro-batch: the largest first, each where there is still room."""
    pieces: list[list[_Siblings]] = []
    filled: list[int] = []
    for family in sorted(families, key=lambda family: -family.num_tokens):
        place = next((i for i, tokens in enumerate(filled) if tokens + family.num_tokens <= enough_tokens), None)
        if place is None:
            pieces.append([family])
            filled.append(family.num_tokens)
        else:
            pieces[place].append(family)
            filled[place] += family.num_tokens
    return pieces


def _pack(samples: _Samples, piece: Sequence[_Siblings]) -> MicroBatch:
    """One micro-batch of some rows; those of a prompt stand together."""
    rows = torch.tensor([row for family in piece for row in family.rows])
    sizes = torch.tensor([len(family.rows) for family in piece])
    firsts = sizes.cumsum(0) - sizes
    family_of_row = torch.repeat_interleave(torch.arange(len(piece)), sizes)
    prompts = samples.prompts.select(samples.prompt_of_row[rows[firsts]])
    continuations, sampled = samples.continuations.select(rows), samples.mask.select(rows).values
    before, after = prompts.lengths, samples.inputs[rows]
    # A continuation begins behind all prompts so far, its own included, and all continuations so far.
    starts = before.cumsum(0)[family_of_row] + after.cumsum(0) - after
    prompt_index = ragged_index(starts[firsts] - before, before)
    index = ragged_index(starts, after)
    tokens = torch.empty(len(prompt_index) + len(index), dtype=torch.int64)
    tokens[prompt_index] = prompts.values
    tokens[index] = continuations.values[ragged_index(continuations.offsets[:-1], after)]
    positions = torch.empty_like(tokens)
    positions[prompt_index] = ragged_index(torch.zeros_like(before), before)
    positions[index] = ragged_index(before[family_of_row], after)
    step = ragged_index(torch.zeros_like(rows), continuations.lengths)[sampled]
    row = torch.repeat_interleave(torch.arange(len(rows)), continuations.lengths)[sampled]
    counts = samples.counts[rows]
    return MicroBatch(
        tokens=tokens,
        positions=positions,
        families=[
            Family(prompt, tuple(length for length in lengths.tolist() if length))
            for prompt, lengths in zip(before.tolist(), torch.split(after, sizes.tolist()), strict=True)
        ],
        select=torch.where(step == 0, starts[firsts][family_of_row[row]], starts[row] + step) - 1,
        targets=continuations.values[sampled],
        response_index=ragged_index((samples.counts.cumsum(0) - samples.counts)[rows], counts),
        response_lengths=counts,
    )
