"""What several responses to one prompt say about a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k responses is correct, estimated without bias from more of them.

    Source: Chen et al., arXiv 2107.03374, equation 1: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: Responses that were graded, n.
        num_correct: Those that are correct, c.
        k: At most n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be between 1 and the {num_samples} responses there are")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], is_correct: Sequence[bool]) -> bool:
    """Whether the answer that most responses give is correct; of equally frequent ones the first counts.

    Args:
        answers: The final answer of each response; None where there is none, which does not vote.
        is_correct: Of each response.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner, _ = votes.most_common(1)[0]
    return is_correct[answers.index(winner)]
