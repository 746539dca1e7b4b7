"""Conversations whose keys and values are kept until their next turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leaderless.data.images import PromptImage, num_alike
from leaderless.rollout.kv_cache import Segment, Store

Tokens = tuple[int, ...]


class _Kept(NamedTuple):
    """A segment with the keys and values of the first of some tokens, their images, and their experts if recorded."""

    tokens: Tokens
    segment: Segment
    experts: Sequence[bytes]
    images: Sequence[PromptImage]


class Conversations:
    """Kept segments of a store, by the numbers of their conversations."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[int, _Kept] = {}  # the one that has been kept for longest is the first

    def __len__(self) -> int:
        """Count the kept segments."""
        return len(self._kept)

    def __contains__(self, conversation: int | None) -> bool:
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

    def num_known(self, conversation: int | None, prompt: Tokens, images: Sequence[PromptImage] = ()) -> int:
        """Count the first tokens of a prompt that need not be read. Its last token always has to be."""
        if conversation not in self._kept:
            return 0
        tokens, segment, _, seen = self._kept[conversation]
        most = min(segment.length, len(prompt) - 1)
        if tokens[:most] != prompt[:most]:
            most = next(place for place in range(most) if tokens[place] != prompt[place])
        return num_alike(seen, images, most)

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
