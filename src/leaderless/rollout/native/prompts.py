"""State of prompts and of the responses that continue them in the native engine, and rows of its passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.data.prompts.images import PromptImage, num_alike
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.vision.mrope import grid_positions
from leaderless.rollout.engine import Completion, SamplingParams
from leaderless.rollout.native.kv_cache import PromptPart, Segment, StateBatches, Store
from leaderless.rollout.native.segment_attention import SharedPrompts
from leaderless.rollout.shaping import GrammarState

Key = tuple[tuple[int, ...], tuple[PromptImage, ...], int]
"""Tokens and images of a prompt, and how many of its tokens attend to one another in both directions."""


@dataclass(eq=False)
class CachedPrompt:
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
    logits: Tensor | None = None  # [vocabulary] float32, for the first token
    experts: list[bytes] = field(default_factory=list)  # of its tokens, as far as they have been read
    saved: int = field(init=False)  # positions that images save, as they have more tokens than that

    def __post_init__(self) -> None:
        self.saved = sum(image.num_saved for image in self.images)

    @property
    def key(self) -> Key:
        """Key of prompts that are read once: the same tokens may belong to other images."""
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
    prompt: CachedPrompt
    num_tokens: int
    conversation: int | None
    num_known: int = 0  # tokens of its prompt that were not read for it, until this has been reported
    segment: Segment | None = None
    seat: int = 0
    grammar: GrammarState | None = None  # what may come next, once something has been drawn by a grammar


Draws = dict[tuple[int, SamplingConfig], list[int]]
"""Rows of the logits by their seed and distribution; those with the same are drawn together."""


class DecodeRows(NamedTuple):
    """Everything that stays the same from pass to pass until responses come, go or move."""

    sequences: list[Response]  # in the order of the segments
    shared: SharedPrompts | None
    draws: Draws
    batches: StateBatches


class PrefillPart(NamedTuple):
    """Tokens that one pass reads, of a prompt or of what continues it."""

    part: PromptPart
    tokens: Sequence[int]
    prompt: CachedPrompt


def passes_of(
    texts: Mapping[Segment, tuple[Segment | None, Sequence[int], CachedPrompt]], most: int
) -> Iterator[list[PrefillPart]]:
    """Divide texts into passes of `most` tokens. Each has a segment, the segment of a prompt before it, and the prompt.

    What is read in both directions is not divided, though it may be longer than a pass.
    """
    parts: list[PrefillPart] = []
    room = most
    for segment, (shared, tokens, prompt) in texts.items():
        begin, num_both = 0, 0 if shared else prompt.num_both
        if parts and num_both > room:
            yield parts
            parts, room = [], most
        while begin < len(tokens):
            some = tokens[begin : max(begin + room, num_both)]
            parts.append(
                PrefillPart(PromptPart(segment, begin, len(some), shared, 0 if begin else num_both), some, prompt)
            )
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


Tokens = tuple[int, ...]


class _Kept(NamedTuple):
    """A segment with the keys and values of the first of some tokens, their images, and their experts if recorded."""

    tokens: Tokens
    segment: Segment
    experts: Sequence[bytes]
    images: Sequence[PromptImage]


class KeptConversations:
    """Kept segments of a store, by the numbers of their conversations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[int, _Kept] = {}  # the one that has been kept for longest is the first

    def __len__(self) -> int:
        """Count the kept segments."""
        return len(self._kept)

    def __contains__(self, conversation: int) -> bool:
        """Check whether a conversation is kept."""
        return conversation in self._kept

    def keep(
        self,
        conversation: int,
        tokens: Tokens,
        segment: Segment,
        experts: Sequence[bytes] = (),
        images: Sequence[PromptImage] = (),
    ) -> None:
        """Keep an active segment, which has keys and values of the first tokens, instead of an earlier one."""
        self.forget(conversation)
        segment.home.keep(segment)
        self._kept[conversation] = _Kept(tokens, segment, experts, images)

    def num_known(self, conversation: int, prompt: Tokens, images: Sequence[PromptImage] = ()) -> int:
        """Count the first tokens of a prompt that need not be read. Its last token always has to be."""
        if conversation not in self._kept:
            return 0
        tokens, segment, _, seen = self._kept[conversation]
        most = min(segment.length, len(prompt) - 1)
        if tokens[:most] != prompt[:most]:
            most = next(place for place in range(most) if tokens[place] != prompt[place])
        most = num_alike(seen, images, most)
        return most if segment.home.can_cut(segment, most) else 0

    def experts(self, conversation: int, num_known: int) -> list[bytes]:
        """Experts of the first tokens of a conversation that is kept."""
        return [*self._kept[conversation].experts[:num_known]]

    def resume(self, conversation: int, num_known: int, prompt: Tokens) -> Segment:
        """Make the segment of a conversation active, for a prompt of which it has the first tokens."""
        segment = self._kept.pop(conversation).segment
        self._store.resume(segment, num_known, len(prompt))
        return segment

    def forget(self, conversation: int) -> None:
        """Free the segment of a conversation, if it is kept."""
        kept = self._kept.pop(conversation, None)
        if kept is not None:
            kept.segment.home.remove(kept.segment)

    def shrink(self, most: int) -> None:
        """Forget those that have been kept for longest, until at most some are left."""
        while len(self._kept) > max(0, most):
            self.forget(next(iter(self._kept)))
