"""Divergences between a student's and a teacher's distribution of a token: their values and their slopes.

With p of the student and q of the teacher, over the same words,

    reverse_kl      KL(p || q)                              MiniLLM, arXiv 2306.08543; on-policy distillation
    forward_kl      KL(q || p)                              Hinton et al., arXiv 1503.02531
    jensen_shannon  b KL(q || m) + (1 - b) KL(p || m)       with m = b q + (1 - b) p; GKD, arXiv 2306.13649

Every one is a sum over words. A teacher may give only some of its likeliest words: then all others are one more word,
whose probability is what is left (`bucket`), or both distributions are those over the given words (`renormalize`).
Merging words makes no divergence larger, so that the former is a lower bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from leaderless.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

DivergenceKind = Literal["reverse_kl", "forward_kl", "jensen_shannon"]
Tail = Literal["bucket", "renormalize"]

TAIL_FLOOR = 1e-7
"""Least probability of the words that are not given: float32 says no less of what is left of 1."""
LOG_TAIL_FLOOR = math.log(TAIL_FLOOR)


class Divergence(NamedTuple):
    """A divergence to be computed.

    Attributes:
        kind: Its name above.
        beta: Weight b of the teacher in the mixture, between 0 and 1, for `jensen_shannon`.
        temperature: Number that divides the logits of both models, above 0.
        tail: Treatment of words that the teacher does not give.
    """

    kind: DivergenceKind = "reverse_kl"
    beta: float = 0.5
    temperature: float = 1.0
    tail: Tail = "bucket"

    def terms(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the term of each word, whose sum is the divergence, and p times its derivative with respect to p.

        With these pulls s, the derivative of the divergence with respect to a logit of the student is s - p sum(s).

        Formula: reverse, p (log p - log q), and the same; forward, q (log q - log p), and -q; Jensen-Shannon,
        b q (log q - log m) + (1 - b) p (log p - log m), and (1 - b) p (log p - log m), as the derivatives with respect
        to m cancel.

        Source: MiniLLM, arXiv 2306.08543, section 2.1, and GKD, arXiv 2306.13649, section 2; the derivatives are worked
        out here. One deviation from MiniLLM: the effect of a token on later ones is left out, as GKD does.

        The arguments are log-probabilities of the same shape.
        """
        match self.kind:
            case "reverse_kl":
                terms = log_p.exp().mul_(log_p - log_q)
                return terms, terms
            case "forward_kl":
                q = log_q.exp()
                return (log_q - log_p).mul_(q), q.neg()
            case "jensen_shannon":
                mixed = torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))
                pulls = (log_p - mixed).mul_(log_p.exp()).mul_(1 - self.beta)
                return (log_q - mixed).mul_(log_q.exp()).mul_(self.beta).add_(pulls), pulls


def log_rest(log_probs: Tensor) -> Tensor:
    """The logarithm of what is left of 1, from [..., words] log-probabilities; at least that of `TAIL_FLOOR`."""
    left = -torch.expm1(torch.logsumexp(log_probs.double(), dim=-1).clamp(max=0.0))
    return left.clamp(min=TAIL_FLOOR).log().to(log_probs.dtype)
