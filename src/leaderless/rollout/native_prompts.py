"""What the native engine knows of prompts and of the responses that continue them, and of the rows of its passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.data.images import PromptImage
from leaderless.models.seen import grid_positions
from leaderless.models.shared_prompts import Family
from leaderless.rollout.engine import Completion, SamplingParams
from leaderless.rollout.kv_cache import Segment
from leaderless.rollout.prefill_attention import PromptPart
from leaderless.rollout.segment_attention import SharedPrompts

Key = tuple[tuple[int, ...], tuple[PromptImage, ...], int]
"""Tokens and images of a prompt, and how many of its tokens attend to one another in both directions."""


@dataclass(eq=False)
class Prompt:
    """A prompt with the tokens from which a response is resumed, and the responses that continue it."""

    tokens: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()
    num_both: int = 0  # first tokens that attend to one another in both directions, if the model reads so
    num_known: int = 0  # first tokens that need not be read for the next response
    waiting: deque[Response] = field(default_factory=deque)
    num_left: int = 0  # responses that have not ended
    is_shared: bool = False  # several responses attend to its segment; a single response extends the segment itself
    segment: Segment | None = None  # None until the prompt has been read
    num_loads: int = 0  # how often weights had been loaded when it was read
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [vocabulary] float32, for the first token
    experts: list[bytes] = field(default_factory=list)  # of its tokens, as far as they have been read
    saved: int = field(init=False)  # positions that images save, as they have more tokens than that

    def __post_init__(self) -> None:
        self.saved = sum(image.num_saved for image in self.images)

    @property
    def key(self) -> Key:
        """What prompts have in common that are read once: the same tokens may be those of other images."""
        return self.tokens, self.images, self.num_both

    def positions(self, begin: int, count: int, *, has_grid: bool) -> Tensor:
        """Positions [count] of some tokens of it, and of what continues it, or [3, count] if it has images in grids."""
        if not (self.images and has_grid):
            return torch.arange(begin, begin + count)
        places = torch.arange(max(begin + count, len(self.tokens)))
        return grid_positions(places, [Family(len(places), ())], self.images)[:, begin : begin + count]


@dataclass(eq=False)
class Response:
    """A response that is waiting, or is being decoded and has a segment; `num_tokens` counts its prompt, too.

    On a device that computes ahead of the host, its last token is in its `seat`.
    """

    request: int
    sibling: int
    sample_id: int
    completion: Completion
    params: SamplingParams
    prompt: Prompt
    conversation: int | None
    num_known: int = 0  # tokens of its prompt that were not read for it, until this has been reported
    segment: Segment | None = None
    num_tokens: int = field(init=False)
    seat: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt.tokens)


Draws = dict[tuple[int, SamplingConfig], list[int]]
"""Rows of the logits by their seed and distribution; those with the same are drawn together."""


class Rows(NamedTuple):
    """Everything that stays the same from pass to pass until responses come, go or move."""

    sequences: list[Response]  # in the order of the segments
    shared: SharedPrompts | None
    draws: Draws


class Part(NamedTuple):
    """Tokens that one pass reads, of a prompt or of what continues it."""

    part: PromptPart
    tokens: Sequence[int]
    prompt: Prompt


def passes_of(texts: Mapping[Segment, tuple[Segment | None, Sequence[int], Prompt]], most: int) -> Iterator[list[Part]]:
    """Divide texts, each with its segment, that of a prompt before it, and the prompt, into passes of `most` tokens.

    What is read in both directions is not divided, though it may be longer than a pass.
    """
    parts: list[Part] = []
    room = most
    for segment, (shared, tokens, prompt) in texts.items():
        begin, num_both = 0, 0 if shared else prompt.num_both
        if parts and num_both > room:
            yield parts
            parts, room = [], most
        while begin < len(tokens):
            some = tokens[begin : max(begin + room, num_both)]
            parts.append(Part(PromptPart(segment, begin, len(some), shared, 0 if begin else num_both), some, prompt))
            begin, room = begin + len(some), max(0, room - len(some))
            if not room:
                yield parts
                parts, room = [], most
    if parts:
        yield parts


def draws_of(sequences: Sequence[Response]) -> Draws:
    """Find the rows of the logits that are drawn together."""
    draws: Draws = {}
    for row, sequence in enumerate(sequences):
        draws.setdefault((sequence.params.seed, sequence.params.distribution), []).append(row)
    return draws
