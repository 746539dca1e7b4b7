"""Values that ranks have in common, or are the sum of, with their gradients; and logits that they divide by words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup

ADDENDS = "addends of ranks that divide a layer"
SUMS = "sums over the words of all ranks"


def mapped(values: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """A linear function of values, whose gradient is another function of the result's gradient."""
    result: Tensor = _Mapped.apply(values, there, back)  # type: ignore[no-untyped-call]
    return result


def copied(values: Tensor, peers: ProcessGroup) -> Tensor:
    """The same values on all ranks, whose gradient is the sum of those that the ranks compute."""
    return mapped(values, lambda own: own.view_as(own), lambda grad: _sum(grad, peers))


def summed(values: Tensor, peers: ProcessGroup) -> Tensor:
    """The sum of the values of all ranks, whose gradient all of them compute."""
    return mapped(values, lambda own: _sum(own, peers), lambda grad: grad)


def _sum(values: Tensor, peers: ProcessGroup) -> Tensor:
    return peers.sum(values.contiguous(), ADDENDS, most_ahead=MESSAGES_AHEAD)


class _Context(FunctionCtx):
    back: Callable[[Tensor], Tensor]


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, values: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


@dataclass(frozen=True)
class VocabularyPart:
    """The words of a rank: as many on each rank, one after the other.

    Attributes:
        peers: Ranks that divide the words.
        num_words: Number of words of a rank.
    """

    peers: ProcessGroup
    num_words: int

    @property
    def first(self) -> int:
        """The first of them."""
        return self.peers.ranks.index(self.peers.rank) * self.num_words

    def of(self, values: Tensor | None) -> Tensor | None:
        """Values for this rank's words, from values for all, [vocabulary]; None for None."""
        return None if values is None else values[self.first : self.first + self.num_words]

    def place_of(self, word: int | None) -> int | None:
        """The place of a word among this rank's words; None if it is not here."""
        place = -1 if word is None else word - self.first
        return place if 0 <= place < self.num_words else None

    def locate(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """The places of words among this rank's words, and whether they are here; where not, the place is any."""
        places = words - self.first
        are_here = (places >= 0) & (places < self.num_words)
        return places.clamp(0, self.num_words - 1), are_here

    def softmax(self, logits: Tensor, targets: Tensor, are_here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of this rank's words, from [n, words] logits, and for all words [n] normalizers and logits.

        The latter belong to the targets, [n, 1] places and whether they are here. A probability is the exponential
        of a logit less the normalizer.
        """
        largest = self.peers.max(logits.amax(dim=-1), SUMS, most_ahead=MESSAGES_AHEAD)
        powers = (logits - largest.unsqueeze(1)).exp_()
        own = (logits.gather(1, targets) * are_here).squeeze(1)
        total, target = self.peers.sum(torch.stack([powers.sum(dim=-1), own]), SUMS, most_ahead=MESSAGES_AHEAD)
        return powers.div_(total.unsqueeze(1)), largest + total.log(), target

    def mean(self, probabilities: Tensor, logits: Tensor) -> Tensor:
        """[n] the mean of logits over all words."""
        return self.peers.sum(torch.linalg.vecdot(probabilities, logits), SUMS, most_ahead=MESSAGES_AHEAD)
