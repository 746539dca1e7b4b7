"""Blocks into which the tokens of a pass are divided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptBlock:
    """Consecutive tokens that attend to themselves, causally, and to a prompt before them."""

    before: range
    own: range
