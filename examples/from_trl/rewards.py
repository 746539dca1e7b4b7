"""A reward as users of TRL write it; it needs nothing of this package, and works in both."""

from __future__ import annotations


def num_unique_letters(completions: list[str], **kwargs: object) -> list[float]:
    """The number of different characters of each completion.

    Args:
        completions: Texts that the policy sampled.
        kwargs: Prompts, and all columns of the rows, as lists.
    """
    return [float(len(set(completion))) for completion in completions]
