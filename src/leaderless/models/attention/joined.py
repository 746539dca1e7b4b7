"""Attention of any form to prompts that are computed once, as parts that are joined by their normalizers.

    prompt   a a a a            own blocks: each token attends within its block, padded with blocks of similar length
    first    . . . . b b b      crossings:  tokens of continuations attend to their prompt, b and c in one call
    second   . . . . c c

What continues a block may be continued in turn. All that does so, and all that continues it, is next to the block, and
attends to it in one call.

A window of w tokens cuts blocks into cells of w. The tokens of a cell attend to it as in a block, and to what they see
of the w - 1 tokens before it, here with w = 4.

    b c d . . .     cell   e f g h      e sees b c d, f sees c d, and g sees d
                                        in reverse order this is causal, too: g sees d, f sees d c, and e sees d c b

A chunk cuts blocks into cells that see nothing before them, apart from the first part of a chunk in a prompt. No call
has a mask, and none computes scores that are not seen, apart from padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from leaderless.models.attention.blocks import LengthBuckets, PromptBlock, SequenceCopies, following
from leaderless.models.attention.form import AttentionForm, gradient_of_sinks
from leaderless.models.attention.recurrence import Mixer, RecurrentPasses, SteppedMixer
from leaderless.models.attention.some_keys import Crossing, attend_within, gradients_within
from leaderless.models.uploads import placed
from leaderless.planner.memory.attention_kinds import AttentionKind


class JoinedCalls(NamedTuple):
    """Calls in which the tokens of a pass attend to all that they see.

    Attributes:
        buckets: Blocks or cells of similar length.
        crossings: Calls to tokens before them.
        masks: Terms of the scores of each bucket; None where all are causal.
    """

    buckets: LengthBuckets
    crossings: Sequence[Crossing]
    masks: Iterable[Tensor] | None = None


class JoinedAttention:
    """Attention of blocks to themselves and to what they continue, of any form, on any device."""

    def __init__(self, blocks: Sequence[PromptBlock], device: torch.device) -> None:
        """Plan calls for blocks that follow one another; those that continue a block come next to it."""
        self._blocks, self._device = blocks, device
        self._calls: dict[AttentionKind, JoinedCalls] = {}

    @cached_property
    def _buckets(self) -> LengthBuckets:
        return LengthBuckets([len(block.own) for block in self._blocks], self._device)

    @cached_property
    def _recurrent(self) -> RecurrentPasses:
        return RecurrentPasses(self._blocks, self._device)

    @cached_property
    def _copies(self) -> SequenceCopies:
        return SequenceCopies(self._blocks, self._device)

    @cached_property
    def _buckets_of_copies(self) -> LengthBuckets:
        return LengthBuckets([len(block.own) for block in self._copies.blocks], self._device)

    @cached_property
    def _recurrent_copies(self) -> RecurrentPasses:
        return RecurrentPasses(self._copies.blocks, self._device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:  # noqa: ARG002
        """Attend within blocks, and from blocks to those they continue; to chosen keys, in copies of sequences."""
        if form.chosen is not None:
            buckets = self._buckets_of_copies
            chosen = JoinedCalls(buckets, (), form.chosen.masks(self._copies, buckets))
            inputs = (self._copies.take(one) for one in (query, key, value))
            return self._copies.own(_Joined.apply(*inputs, form.sinks, chosen, form))  # type: ignore[no-untyped-call]
        calls = self._calls.get(form.kind)
        if calls is None:  # the same for all layers of a kind
            calls = self._calls[form.kind] = self._calls_of(form.kind)
        output: Tensor = _Joined.apply(query, key, value, form.sinks, calls, form)  # type: ignore[no-untyped-call]
        return output

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:  # noqa: ARG002
        """Read blocks, from the states behind those that they continue on, or after copies of them."""
        if isinstance(mixer, SteppedMixer):
            return self._copies.own(self._recurrent_copies.recur(mixer, self._copies.take(hidden)))
        return self._recurrent.recur(mixer, hidden)

    def _calls_of(self, kind: AttentionKind) -> JoinedCalls:
        if kind.first_key(max(block.length for block in self._blocks) - 1) == 0:
            pairs = following(self._blocks).items()
            whole = [Crossing(slice(keys.start, keys.stop), slice(own.start, own.stop)) for keys, own in pairs]
            return JoinedCalls(self._buckets, whole)
        cells = [_cells(kind, block) for block in self._blocks]
        buckets = LengthBuckets([len(cell) for some in cells for cell in some], self._device)
        return JoinedCalls(buckets, [*self._between_cells(kind, cells), *self._to_earlier_blocks(kind)])

    def _between_cells(self, kind: AttentionKind, cells: Sequence[Sequence[range]]) -> Iterator[Crossing]:
        """Calls from the cells of a window to those before them, together for cells of the same length."""
        if kind.window is None:
            return
        begins = dict[int, list[int]]()
        for cell in (cell for some in cells for cell in some[1:]):
            begins.setdefault(min(len(cell), kind.window - 1), []).append(cell.start)
        for count, places in begins.items():
            before = torch.tensor(places)[:, None] + torch.arange(1 - kind.window, 0)
            yield from self._through_window(kind.window, count, places, before)

    def _to_earlier_blocks(self, kind: AttentionKind) -> Iterator[Crossing]:
        """Calls from the first cells of blocks to what they see of those that they continue."""
        groups = dict[tuple[range, ...], list[PromptBlock]]()
        for block in self._blocks:
            if block.before:
                groups.setdefault(block.before, []).append(block)
        for siblings in groups.values():
            one = siblings[0]
            before = one.places[: one.position][None]
            first = kind.first_key(one.position)
            if kind.first_key(max(block.length for block in siblings) - 1) == 0:
                yield Crossing(self._at(one.before), self._at([block.own for block in siblings]))
            elif kind.window is None:
                if first < one.position:
                    cells = torch.tensor([[place for block in siblings for place in _cells(kind, block)[0]]])
                    yield Crossing(placed(before[:, first:], self._device), placed(cells, self._device))
            else:
                begins = dict[int, list[int]]()
                for block in siblings:
                    begins.setdefault(min(len(block.own), kind.window - 1), []).append(block.own.start)
                for count, places in begins.items():
                    yield from self._through_window(kind.window, count, places, before[:, first:])

    def _at(self, parts: Sequence[range]) -> slice | Tensor:
        """The places of a call that are in some parts of a pass."""
        if all(one.stop == other.start for one, other in pairwise(parts)):
            return slice(parts[0].start, parts[-1].stop)
        return placed(torch.cat([torch.arange(part.start, part.stop) for part in parts])[None], self._device)

    def _through_window(
        self, window: int, num_queries: int, begins: Sequence[int], before: Tensor
    ) -> Iterator[Crossing]:
        """Calls from the first tokens of cells, which begin at some places, to tokens before them.

        Of the w - 1 tokens before a cell, the last ones exist, of which the places, [cells or 1, n] int64, are given.
        The token at place i of the cell sees those from place i on. So all see those behind the number of tokens, and
        the rest is a triangle in reverse order, next to a rectangle if the first places do not exist.
        """
        missing = window - 1 - before.shape[1]
        triangle = range(num_queries - 1, missing - 1, -1)
        for queries, keys, is_causal in (
            (range(num_queries), range(max(num_queries, missing), window - 1), False),
            (range(missing), range(missing, num_queries), False),
            (triangle, triangle, True),
        ):
            if queries and keys:
                seen = before[:, torch.tensor(keys) - missing]
                own = torch.tensor(begins)[:, None] + torch.tensor(queries)
                yield Crossing(placed(seen, self._device), placed(own, self._device), is_causal)


def _cells(kind: AttentionKind, block: PromptBlock) -> list[range]:
    """Cut a block where a chunk ends, or into cells as long as the window."""
    first = kind.window if kind.chunk is None else kind.chunk - block.position % kind.chunk
    size = kind.window if kind.chunk is None else kind.chunk
    assert first is not None
    assert size is not None
    edges = [block.own.start, *range(block.own.start + first, block.own.stop, size), block.own.stop]
    return [range(begin, end) for begin, end in pairwise(edges)]


class _Context(FunctionCtx):
    """Everything the backward pass needs from the forward pass."""

    saved_tensors: tuple[Tensor, ...]
    calls: JoinedCalls
    form: AttentionForm


class _Joined(torch.autograd.Function):
    """Attention in parts, with its gradient: that of each part follows from the joined result and normalizers."""

    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,  # of the form, so that they get a gradient
        calls: JoinedCalls,
        form: AttentionForm,
    ) -> Tensor:
        output, normalizer = attend_within(form, calls.buckets, query, key, value, calls.masks)
        for crossing in calls.crossings:
            crossing.attend(form, query, key, value, output, normalizer)
        output, normalizer = form.added_sink(output, normalizer)
        ctx.save_for_backward(query, key, value, output, normalizer, *(() if sinks is None else (sinks,)))
        ctx.calls, ctx.form = calls, form
        return output

    @staticmethod
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, output, normalizer, *sinks = ctx.saved_tensors
        calls, form = ctx.calls, ctx.form
        whole = grad_output, query, key, value, output, normalizer
        grads = gradients_within(form, calls.buckets, *whole, calls.masks)
        for crossing in calls.crossings:
            crossing.add_gradients(form, *whole, grads)
        of_sinks = gradient_of_sinks(grad_output, output, normalizer, sinks[0]) if sinks else None
        return grads[0], grads[1], grads[2], of_sinks, None, None
