"""Words that tokens could be drawn as, where sampling leaves others out: their logits alone make the probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.data.batch import ragged_index
from leaderless.models.parallel.reductions import VocabularyPart
from leaderless.models.uploads import placed

OUTSIDE = -1e20
"""Logit of a word that could not be drawn: its probability is exactly 0, and all products with it are finite."""


@dataclass(frozen=True)
class Support:
    """The words that each of some tokens could be drawn as, in host memory.

    Attributes:
        words: [total] int, one token after the other.
        sizes: [R] int64, number of words of each token; 0 for a token that could be any word.
    """

    words: Tensor
    sizes: Tensor

    def __getitem__(self, places: Tensor) -> Support:
        """The same for some of the tokens."""
        sizes = self.sizes[places]
        begins = (self.sizes.cumsum(0) - self.sizes)[places]
        return Support(self.words[ragged_index(begins, sizes)], sizes)

    def limits(self, part: VocabularyPart | None, device: torch.device) -> Limits:
        """The same for the words of a rank, on a device."""
        words, rows = self.words.long(), torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes)
        if part is not None:
            words, are_here = part.locate(words)
            words, rows = words[are_here], rows[are_here]
        ends = torch.bincount(rows, minlength=len(self.sizes)).cumsum(0)
        is_limited = placed((self.sizes > 0).unsqueeze(1), device)
        return Limits(placed(words, device), placed(rows, device), is_limited, [0, *ends.tolist()])


class Limits(NamedTuple):
    """Words with the tokens that could be drawn as them, [total] int64, and whether a token has any, [R, 1] bool.

    Those of a token begin at its place in `begins`.
    """

    words: Tensor
    rows: Tensor
    is_limited: Tensor
    begins: list[int]

    def apply(self, logits: Tensor, chunk: slice) -> None:
        """Leave out all other words from [rows, vocabulary] logits of a chunk of the tokens, in place."""
        own = slice(self.begins[chunk.start], self.begins[chunk.stop])
        places = self.rows[own] - chunk.start, self.words[own]
        kept = logits[places]
        logits.masked_fill_(self.is_limited[chunk], OUTSIDE)
        logits[places] = kept
