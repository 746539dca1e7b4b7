"""How the tokens of a pass are laid out for attention: in blocks, in buckets of similar length, and several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from leaderless.models.parallel.reductions import mapped
from leaderless.models.uploads import placed

BUCKET_FILL = 0.75
"""Smallest ratio of the shortest to the longest sequence in one padded attention call."""


@dataclass(frozen=True)
class PromptBlock:
    """Consecutive tokens that attend to themselves, causally, and to whole blocks before them.

    Attributes:
        before: Blocks that they continue: a prompt, then what follows it.
        own: Their places in the pass.
    """

    before: tuple[range, ...]
    own: range

    @property
    def position(self) -> int:
        """Number of tokens before them in their sequences."""
        return sum(map(len, self.before))

    @property
    def length(self) -> int:
        """Number of tokens of their sequence, up to their last one."""
        return self.position + len(self.own)

    @property
    def places(self) -> Tensor:
        """[length] int64, places in the pass of all of these tokens."""
        return torch.cat([torch.arange(part.start, part.stop) for part in (*self.before, self.own)])


def following(blocks: Sequence[PromptBlock]) -> Mapping[range, range]:
    """The blocks that others continue, each with the tokens of those, which are next to it."""
    ends = {before: block.own.stop for block in blocks for before in block.before}
    return {before: range(before.stop, end) for before, end in ends.items()}


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of similar length that are computed together, padded to the longest."""

    count: int
    longest: int
    tokens: Tensor
    """[count * longest] int64, tokens of the pass; padding repeats the last token of a sequence."""
    padding: Tensor
    """[p] int64, places of the padding in `tokens`."""
    begins: Tensor
    """[count] int64, first tokens of the sequences, on the host."""

    def take(self, values: Tensor, padding: float | None = None) -> Tensor:
        """Lay out [T, heads, ...] queries, keys or values for one call, as [count, heads, longest, ...].

        Padding has the value of the sequence's last token unless another is given.
        """
        taken = values.index_select(0, self.tokens)
        if padding is not None:
            taken.index_fill_(0, self.padding, padding)
        return taken.view(self.count, self.longest, *values.shape[1:]).transpose(1, 2)


class LengthBuckets:
    """The sequences of a pass, sorted into buckets.

    Attributes:
        all: The buckets, the longest sequences first.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Plan calls for consecutive sequences, with lengths of at least 1."""
        sequences = torch.split(torch.arange(sum(lengths)), list(lengths))
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        grouped: list[list[Tensor]] = []
        for sequence in (sequences[i] for i in order):
            if grouped and len(sequence) >= BUCKET_FILL * len(grouped[-1][0]):
                grouped[-1].append(sequence)
            else:
                grouped.append([sequence])
        self.all: list[LengthBucket] = []
        place = torch.empty(sum(lengths), dtype=torch.int64)
        offset = 0
        for members in grouped:
            counts = torch.tensor([len(sequence) for sequence in members])[:, None]
            ends = counts.cumsum(0)
            step = torch.arange(len(members[0]))[None, :]
            tokens = torch.cat(members)[torch.minimum(ends - counts + step, ends - 1)].flatten()
            is_real = (step < counts).flatten()
            place[tokens[is_real]] = offset + is_real.nonzero().squeeze(1)
            padding = (~is_real).nonzero().squeeze(1)
            own = placed(tokens, device), placed(padding, device)
            begins = torch.stack([sequence[0] for sequence in members])
            self.all.append(LengthBucket(len(members), len(members[0]), *own, begins))
            offset += len(tokens)
        self._place = placed(place, device)

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Put results of all buckets, [count, heads, longest, ...], into the order of the tokens: [T, heads, ...]."""
        flat = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
        return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, self._place)


class Repeats:
    """Rows of a tensor that are taken, some of them several times, and some perhaps not at all.

    The backward pass of `index_select` adds gradients up one by one, in bfloat16 and in the order in which threads
    arrive: the gradient of a row would lose digits each time it was taken, and differ from pass to pass. Here they are
    added up in float32 and in a fixed order. FlashAttention's own backward pass may add up in any order all the same.
    """

    def __init__(self, rows: Tensor, num_rows: int, device: torch.device) -> None:
        """Plan to take [n] int64 rows, which are on the host, of a tensor with `num_rows` on a device."""
        counts, order = rows.bincount(minlength=num_rows), rows.argsort(stable=True)
        begins = counts.cumsum(0) - counts
        self._rows, self._num_rows, self._has_all = placed(rows, device), num_rows, bool(counts.all())
        # By number of times: rows that are taken so often, and [rows, times] places where.
        self._places: list[tuple[Tensor, Tensor]] = []
        for times in sorted(set(counts.tolist()) - {0}):
            own = (counts == times).nonzero().squeeze(1)
            places = order[begins[own][:, None] + torch.arange(times)]
            self._places.append((placed(own, device), placed(places, device)))

    def take(self, values: Tensor) -> Tensor:
        """Turn [num_rows, ...] into [n, ...]."""
        return mapped(values, lambda own: own.index_select(0, self._rows), self._add_up)

    def _add_up(self, grad: Tensor) -> Tensor:
        """The sums of [n, ...] gradients over the places of each row, [num_rows, ...]."""
        make = grad.new_empty if self._has_all else grad.new_zeros
        total = make(self._num_rows, *grad.shape[1:])
        dtype = torch.promote_types(grad.dtype, torch.float32)
        for rows, places in self._places:
            parts = grad.index_select(0, places.flatten()).view(*places.shape, *grad.shape[1:])
            total.index_copy_(0, rows, parts.sum(1, dtype=dtype).to(grad.dtype))
        return total


class SequenceCopies:
    """The sequences of a pass one after the other, each block with copies of those that it continues before it.

    Attributes:
        blocks: The sequences, which attend to themselves alone.
        sequences: [tokens] int64 places of the tokens of each sequence in the pass, on the device.
    """

    def __init__(self, blocks: Sequence[PromptBlock], device: torch.device) -> None:
        """Plan the copies for blocks that follow one another."""
        lengths = [block.length for block in blocks]
        self.blocks = [PromptBlock((), range(*ends)) for ends in pairwise(accumulate([0, *lengths]))]
        rows = torch.cat([block.places for block in blocks])
        self.sequences = torch.split(placed(rows, device), lengths)
        self._copies = Repeats(rows, int(rows.max()) + 1, device)
        is_own = [is_own for one in blocks for is_own in [False] * one.position + [True] * len(one.own)]
        self._own = placed(torch.tensor(is_own).nonzero().squeeze(1), device)

    def take(self, values: Tensor) -> Tensor:
        """Turn [T, ...], of the tokens of a pass, into [n, ...], of all sequences."""
        return self._copies.take(values)

    def own(self, results: Tensor) -> Tensor:
        """Turn [n, ...] results of all sequences into those of the tokens of the pass, [T, ...]."""
        return results.index_select(0, self._own)
