"""Results of the vision tower for the images in a pass, and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from leaderless.data.prompts.images import PromptImage
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.uploads import placed


@dataclass(frozen=True)
class ImagePositions:
    """Results of the vision tower for the images of a pass.

    Attributes:
        places: [n] int64, tokens of the pass that stand for parts of the images.
        embeddings: [n, hidden_size], in place of the tokens' embeddings.
        added: [n, hidden_size] each, added to the outputs of the first layers.
    """

    places: Tensor
    embeddings: Tensor
    added: Sequence[Tensor] = ()

    def embed(self, embeddings: Tensor) -> Tensor:
        """Put what is seen into [T, hidden_size] embeddings of tokens."""
        return embeddings.index_copy(0, self.places, self.embeddings.to(embeddings.dtype))

    def add(self, layer: int, hidden: Tensor) -> Tensor:
        """Add what belongs behind a layer to its output [T, hidden_size]."""
        if layer >= len(self.added):
            return hidden
        return hidden.index_add(0, self.places, self.added[layer].to(hidden.dtype))

    def only(self, is_read: Tensor) -> ImagePositions:
        """Results at some of the tokens, of which [n] bool, on the host, is a mask; see `placed`."""
        if bool(is_read.all()):
            return self
        rows = placed(is_read.nonzero().squeeze(1), self.places.device)
        places, embeddings, *added = (one.index_select(0, rows) for one in (self.places, self.embeddings, *self.added))
        return ImagePositions(places, embeddings, added)


def grid_positions(positions: Tensor, families: Sequence[Family], images: Sequence[PromptImage]) -> Tensor:
    """Positions [3, T] of the tokens of a pass: time, row and column.

    A token of text at place p of its sample has p three times, less what the images before it save: an image of r rows
    and c columns takes r * c tokens, but positions only to max(r, c). A token of an image has its time, and counts its
    row and its column from there (arXiv 2409.12191, section 2.1).

    Args:
        positions: [T] int64, place of each token in its sample.
        families: Prompts and their continuations, of which the pass consists.
        images: Images with the places of their tokens in the pass, in order. Each moves the positions of what follows
            in the prompt or the continuation that it is in, and in all that continues this.
    """
    result = torch.stack([positions] * 3)
    begin, waiting = 0, list(images)
    for family in families:
        ends = [*accumulate(family.continuations, initial=begin + family.prompt)]
        end, reached = ends[-1], [*ends]  # reached: where what continues each part ends
        for part, parent in reversed([*enumerate(family.parents or (-1,) * len(family.continuations), start=1)]):
            reached[parent + 1] = max(reached[parent + 1], reached[part])
        while waiting and waiting[0].place < end:
            image = waiting.pop(0)
            first, after = image.place, image.place + image.num_tokens
            last = next(stop for stop, one in zip(reached, ends, strict=True) if first < one)
            start = int(result[0, first])
            result[:, first:after] = start
            result[1, first:after] += torch.arange(image.rows).repeat_interleave(image.columns)
            result[2, first:after] += torch.arange(image.columns).repeat(image.rows)
            result[:, after:last] -= image.num_saved
        begin = end
    return result
