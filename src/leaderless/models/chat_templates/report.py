"""Facts about a chat template: the tokens that it adds, and where it is not append-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal[
    "earlier reasoning is dropped",
    "the end token is missing",
    "characters of two turns become one token",
    "white space is changed",
    "text is rewritten",
]

REMEDIES: dict[Cause, str] = {
    "earlier reasoning is dropped": "let the template keep the reasoning of all turns",
    "the end token is missing": "let the template write the end token after each answer",
    "characters of two turns become one token": "let the template put a special token between turns",
    "white space is changed": "let the template write answers as they are, without trimming them",
    "text is rewritten": "let the template write a message in the same way wherever it is",
}


@dataclass(frozen=True)
class TemplatePiece:
    """Consecutive tokens of a conversation.

    Attributes:
        place: Place of the piece, such as `before a user message`, or a role for what a message says.
        is_scaffold: Whether the template has added the tokens.
        tokens: Token ids.
        text: Text of the tokens.
    """

    place: str
    is_scaffold: bool
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class TemplateDifference:
    """First difference between what the model has seen and written, and the prompt of its next turn.

    Attributes:
        turn: Number of the assistant's turn whose prompt differs, from 1.
        after: Role of the message before that turn.
        position: Number of equal tokens before the difference.
        was: Some tokens that were there, from the difference on.
        was_text: Text of these tokens.
        now: Tokens that are there instead.
        now_text: Text of those tokens.
        cause: Cause, in plain words.
    """

    turn: int
    after: str
    position: int
    was: tuple[int, ...]
    was_text: str
    now: tuple[int, ...]
    now_text: str
    cause: Cause


@dataclass(frozen=True)
class TemplateTrial:
    """Effect of a template on a conversation.

    Attributes:
        conversation: Name of the conversation.
        pieces: Tokens of the last prompt, in order. After a difference, only those that were added later.
        differences: Differences, at most one for each turn.
    """

    conversation: str
    pieces: tuple[TemplatePiece, ...]
    differences: tuple[TemplateDifference, ...]


@dataclass(frozen=True)
class TemplateReport:
    """Facts about a chat template.

    Attributes:
        end: Text of the token that ends an answer; empty if there is none.
        end_token: Id of that token; None if there is none.
        refused: Reasons why it cannot render system messages or tools, by `system` and `tools`.
        trials: Trials, one for each conversation.
    """

    end: str
    end_token: int | None
    refused: dict[str, str]
    trials: tuple[TemplateTrial, ...]

    @property
    def differences(self) -> list[TemplateDifference]:
        """Differences of all trials."""
        return [difference for trial in self.trials for difference in trial.differences]

    @property
    def is_append_only(self) -> bool:
        """Whether each prompt begins with all that the model has seen and written before."""
        return not self.differences

    def boundaries(self) -> list[TemplatePiece]:
        """The different pieces that the template adds, in the order in which they first occur."""
        return list(dict.fromkeys(p for trial in self.trials for p in trial.pieces if p.is_scaffold))

    def verdict(self) -> str:
        """The verdict, its consequence and the remedy, on one line."""
        if self.is_append_only:
            return "append-only: the turns of an episode are one sample"
        places = " and ".join(f"each {name}" for name in dict.fromkeys(map(_name, self.differences)))
        causes = list(dict.fromkeys(difference.cause for difference in self.differences))
        remedies = "; ".join(REMEDIES[cause] for cause in causes)
        return (
            f"not append-only: episodes continue with what was sampled, and differ from what the template would write "
            f"after {places}, since {' and '.join(causes)}; to avoid this, {remedies}"
        )


def _name(difference: TemplateDifference) -> str:
    return {"user": "user message", "tool": "tool result"}.get(difference.after, f"{difference.after} message")
