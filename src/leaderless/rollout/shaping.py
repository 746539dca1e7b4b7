"""What clients of a served model may ask beyond the distribution of tokens. Samples for training never have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

Ranked = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the likeliest first."""


class GrammarState(Protocol):
    """What may follow one response."""

    def allowed(self) -> Tensor:
        """Tokens that may come next, [vocabulary] bool; an end token if the response may end."""

    def take(self, token: int) -> None:
        """Go on behind a token that was allowed."""


class Grammar(Protocol):
    """Texts that responses may be."""

    def begin(self) -> GrammarState:
        """The state at the beginning of a response."""


@dataclass(frozen=True, eq=False)
class Shaping:
    """Changes of the logits, and further facts about tokens.

    Attributes:
        frequency_penalty: Number that is subtracted from the logit of a token for each time that the response has it.
        presence_penalty: Number that is subtracted from the logits of tokens that the response has.
        logit_bias: Number that is added to the logit of each of some tokens.
        grammar: Texts that responses may be; None for any.
        num_likely: Number of likely tokens that are reported with each sampled token.
        scores_prompt: Whether log-probabilities of the prompt's tokens are reported, and its likely tokens.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    num_likely: int = 0
    scores_prompt: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether what a response has changes the logits of its next token."""
        return bool(self.frequency_penalty or self.presence_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from another distribution than that of the model."""
        return self.has_penalties or bool(self.logit_bias) or self.grammar is not None


class PromptScores(NamedTuple):
    """Log-probabilities of a prompt's tokens, under the model, and the likeliest tokens at their places.

    The first token follows on nothing, and has none.
    """

    log_probs: Sequence[float]
    likely: Sequence[Ranked]


def refuse_shaping(shaping: Shaping | None, engine: str) -> None:
    """Raise `ValueError` if an engine is asked for what only the native one can do."""
    if shaping is not None:
        raise ValueError(
            f"{engine} returns no log-probabilities of prompts or of other tokens than the sampled one, and takes no "
            "penalties, logit_bias, response_format or demanded calls: leave them out, or serve with --full"
        )
