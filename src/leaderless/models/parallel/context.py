"""Context parallelism: ranks divide the tokens of a pass, and the heads of its attention.

Everything in a decoder but attention works token by token. Around attention, the ranks exchange what they have: before
it, each has some tokens of all heads, in it all tokens of some heads, and after it the former again (Ulysses, arXiv
2309.14509). So attention itself is computed as on one rank, with any kernel, and prompts are still shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.recurrence import Mixer
from leaderless.models.attention.shared_prompts import Family, attention_over
from leaderless.models.parallel.reductions import mapped

SWAPPED = "queries, keys and values of parts of a pass"


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that divide the tokens of a pass into parts of equal size.

    Attributes:
        peers: These ranks, of which each has the whole pass before and after it.
    """

    peers: ProcessGroup

    @property
    def size(self) -> int:
        """Number of parts."""
        return self.peers.size

    @property
    def place(self) -> int:
        """The place of this rank's part."""
        return self.peers.ranks.index(self.peers.rank)

    def chunks(self, place: int) -> tuple[int, ...]:
        """The chunks that are the part of a rank, of all that a pass is cut into."""
        return (place,)

    @property
    def num_chunks(self) -> int:
        """Chunks of a pass, of equal size."""
        return self.size * len(self.chunks(0))

    def padded(self, families: Sequence[Family]) -> list[Family]:
        """The families of a pass with as many more of a single token as its chunks need to be equal."""
        missing = -sum(family.num_tokens for family in families) % self.num_chunks
        return [*families, *[Family(1, ())] * missing]

    def part(self, values: Tensor) -> Tensor:
        """This rank's part of [T, ...] numbers of a pass that is not padded yet; padding is 0."""
        values = torch.cat([values, values.new_zeros(-len(values) % self.num_chunks, *values.shape[1:])])
        chunks = values.chunk(self.num_chunks)
        return torch.cat([chunks[chunk] for chunk in self.chunks(self.place)])

    def places(self, select: Tensor, num_tokens: int) -> list[Tensor]:
        """For each part, which of the selected tokens, [R] int64 indices among T, are in it: indices of `select`."""
        chunks = select // -(-num_tokens // self.num_chunks)
        return [torch.isin(chunks, torch.tensor(self.chunks(place))).nonzero().squeeze(1) for place in range(self.size)]

    def within(self, select: Tensor, part_tokens: int) -> Tensor:
        """The places of tokens within this rank's part, which has a number of them, from their places in the pass."""
        own = torch.tensor(self.chunks(self.place))
        length = part_tokens // len(own)
        chunk = select // length
        return select % length + length * (chunk[:, None] == own).int().argmax(1)

    def attention(self, families: Sequence[Family], device: torch.device, compute_dtype: torch.dtype) -> Attention:
        """Attention of this rank's part of a pass over consecutive families, which fill all parts."""
        return UlyssesAttention(attention_over(families, device, compute_dtype), self.peers)

    def gather(self, values: Tensor, places: Sequence[Tensor], order: Tensor) -> Tensor:
        """Results for all selected tokens [R] from the results of this rank's part, with a gradient for the latter.

        `places` belong to each part; `order` has all of them, one part after the other, on the device of the values.
        """
        counts = [len(place) for place in places]
        begin = sum(counts[: self.place])

        def join(own: Tensor) -> Tensor:
            padded = own.new_zeros(max(counts), *own.shape[1:])
            padded[: len(own)] = own
            gathered = self.peers.gather_even(padded, "the results of parts of a pass")
            result = own.new_empty(len(order), *own.shape[1:])
            result[order] = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
            return result

        # A rank's own results have a gradient: the others compute the same loss with theirs.
        return mapped(values, join, lambda grad: grad[order[begin : begin + counts[self.place]]])


class UlyssesAttention:
    """Attention of tokens that are divided over ranks, by exchanging tokens for heads and back."""

    def __init__(self, whole: Attention, peers: ProcessGroup) -> None:
        """Attend like `whole`, which knows the tokens of all ranks, but to a part of the heads."""
        self._whole, self._peers = whole, peers

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Fail: such a model is refused when ranks divide its tokens."""
        raise AssertionError(f"layer {layer} reads {len(hidden)} tokens of a part of a pass by {mixer}")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attend to all tokens with a part of the heads; T is the number of this rank's tokens.

        Keys and values of a head that several ranks need are sent to each of them.
        """
        size = self._peers.size
        key, value = (_repeated(tensor, query.shape[1], size) for tensor in (key, value))
        count = len(query)
        parts = [tensor.reshape(count, size, -1, tensor.shape[2]) for tensor in (query, key, value)]
        shapes = [part.shape[2:] for part in parts]
        mine = self._swap(torch.cat([part.flatten(2) for part in parts], 2).transpose(0, 1)).flatten(0, 1)
        taken = torch.split(mine, [shape.numel() for shape in shapes], 1)
        q, k, v = (part.reshape(-1, *shape) for part, shape in zip(taken, shapes, strict=True))
        output = self._whole.attend(layer, q, k, v, form.part(self._peers.ranks.index(self._peers.rank), size))
        return self._swap(output.reshape(size, count, *output.shape[1:])).transpose(0, 1).flatten(1, 2)

    def _swap(self, values: Tensor) -> Tensor:
        """Send the first-dimension part of each rank to it; the inverse is the same, and so is the gradient."""
        peers = self._peers
        return mapped(
            values.contiguous(),
            lambda own: peers.swap(own, SWAPPED),
            lambda grad: peers.swap(grad.contiguous(), SWAPPED),
        )


def _repeated(values: Tensor, query_heads: int, size: int) -> Tensor:
    """Keys or values with each head as often as it takes for ranks to divide them like the heads of the queries."""
    heads = values.shape[1]
    if heads % size == 0:
        return values
    return values.repeat_interleave(size // heads if size % heads == 0 else query_heads // heads, dim=1)
