"""Attention of any form to prompts that are computed once, as parts that are joined by their normalizers.

    prompt   a a a a            own blocks: each token attends within its block, padded with blocks of similar length
    first    . . . . b b b      crossings:  tokens of continuations attend to their prompt, b and c in one call
    second   . . . . c c

A window or a chunk leaves only the first tokens of a continuation, and the last ones of its prompt, to a crossing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from leaderless.models.attention.blocks import LengthBucket, LengthBuckets, PromptBlock
from leaderless.models.attention.form import AttentionForm, as_scores, gradient_of_sinks, seen_keys
from leaderless.models.attention.recurrence import Mixer, RecurrentPasses
from leaderless.models.attention.some_keys import attend_some, gradients_of_some
from leaderless.models.uploads import placed
from leaderless.planner.memory.attention_kinds import AttentionKind


class Crossing(NamedTuple):
    """Tokens of continuations that attend to tokens of their prompt.

    Attributes:
        prompt: Places of the latter.
        rest: Places of the former: consecutive ones, or [n] int64 on the device.
        mask: [1, 1, n, keys] float32, added to scores; None if all are seen.
    """

    prompt: slice
    rest: slice | Tensor
    mask: Tensor | None = None


class JoinedCalls(NamedTuple):
    """Calls in which the tokens of a pass attend to all that they see.

    Attributes:
        buckets: Blocks of similar length.
        masks: Terms of the scores of each bucket, [count or 1, 1, longest, longest]; None where it is causal.
        crossings: Calls from continuations to prompts.
    """

    buckets: LengthBuckets
    masks: Sequence[Tensor | None]
    crossings: Sequence[Crossing]


class JoinedAttention:
    """Attention of blocks to themselves and to prompts before them, of any form, on any device."""

    def __init__(self, blocks: Sequence[PromptBlock], device: torch.device) -> None:
        """Plan calls for blocks that follow one another; those with the same prompt follow it."""
        self._blocks, self._device = blocks, device
        self._calls: dict[AttentionKind, JoinedCalls] = {}

    @cached_property
    def _buckets(self) -> LengthBuckets:
        return LengthBuckets([len(block.own) for block in self._blocks], self._device)

    @cached_property
    def _positions(self) -> Tensor:
        """[T] int64 places of tokens in their sequences."""
        return torch.cat([torch.arange(len(block.own)) + len(block.before) for block in self._blocks])

    @cached_property
    def _recurrent(self) -> RecurrentPasses:
        return RecurrentPasses(self._blocks, self._device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:  # noqa: ARG002
        """Attend within blocks, and from continuations to their prompts."""
        calls = self._calls.get(form.kind)
        if calls is None:  # the same for all layers of a kind
            masks = [self._mask(bucket, form.kind) for bucket in self._buckets.all]
            calls = self._calls[form.kind] = JoinedCalls(self._buckets, masks, [*self._crossings(form.kind)])
        output: Tensor = _Joined.apply(query, key, value, form.sinks, calls, form)  # type: ignore[no-untyped-call]
        return output

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:  # noqa: ARG002
        """Read blocks, continuations from the states behind their prompts on."""
        return self._recurrent.recur(mixer, hidden)

    def _mask(self, bucket: LengthBucket, kind: AttentionKind) -> Tensor | None:
        """The mask of a bucket, in which padding comes after real tokens."""
        begins = self._positions[bucket.begins] if kind.chunk is not None else torch.zeros(1, dtype=torch.int64)
        last = int(begins.max()) + bucket.longest - 1
        if kind.sees_all or kind.first_key(last) == 0:
            return None
        positions = begins[:, None] + torch.arange(bucket.longest)
        return placed(as_scores(seen_keys(kind, positions, positions)), self._device).unsqueeze(1)

    def _crossings(self, kind: AttentionKind) -> Iterator[Crossing]:
        for before, blocks in groupby(self._blocks, lambda block: block.before):
            if not before:
                continue
            places = [block.own for block in blocks]
            rest = slice(places[0].start, places[-1].stop)
            if kind.first_key(int(self._positions[rest].max())) == 0:
                yield Crossing(slice(before.start, before.stop), rest)
                continue
            first = kind.first_key(len(before))  # later tokens see less of the prompt
            is_seen = seen_keys(kind, self._positions[rest], torch.arange(first, len(before)))
            sees_some = is_seen.any(1).nonzero().squeeze(1)
            if len(sees_some):
                mask = placed(as_scores(is_seen[sees_some]), self._device)[None, None]
                rows = placed(rest.start + sees_some, self._device)
                yield Crossing(slice(before.start + first, before.stop), rows, mask)


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
        buckets = calls.buckets
        results = [
            attend_some(form, *(bucket.take(one) for one in (query, key, value)), mask=mask, is_causal=mask is None)
            for bucket, mask in zip(buckets.all, calls.masks, strict=True)
        ]
        output, normalizer = (buckets.join([result[kind] for result in results]) for kind in range(2))
        for prompt, rest, mask in calls.crossings:
            q, k, v = (heads_first(one) for one in (query[rest], key[prompt], value[prompt]))
            other, other_normalizer = map(tokens_first, attend_some(form, q, k, v, mask=mask))
            whole = torch.logaddexp(normalizer[rest], other_normalizer)
            share = (other_normalizer - whole).exp_().unsqueeze(2).to(other.dtype)
            if isinstance(rest, slice):
                output[rest].lerp_(other, share)
            else:
                output[rest] = output[rest].lerp_(other, share)
            normalizer[rest] = whole
        output, normalizer = form.added_sink(output, normalizer)
        ctx.save_for_backward(query, key, value, output, normalizer, *(() if sinks is None else (sinks,)))
        ctx.calls, ctx.form = calls, form
        return output

    @staticmethod
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, output, normalizer, *sinks = ctx.saved_tensors
        calls, form = ctx.calls, ctx.form
        results = [
            gradients_of_some(
                form,
                bucket.take(grad_output, padding=0.0),
                *(bucket.take(values) for values in (query, key, value, output, normalizer)),
                mask=mask,
                is_causal=mask is None,
            )
            for bucket, mask in zip(calls.buckets.all, calls.masks, strict=True)
        ]
        grads = tuple(calls.buckets.join([result[kind] for result in results]) for kind in range(3))
        for prompt, rest, mask in calls.crossings:
            places = (rest, rest, prompt, prompt, rest, rest)
            whole = (grad_output, query, key, value, output, normalizer)
            taken = (heads_first(values[place]) for values, place in zip(whole, places, strict=True))
            result = gradients_of_some(form, *taken, mask=mask)
            for grad, place, part in zip(grads, (rest, prompt, prompt), result, strict=True):
                grad[place] += tokens_first(part)
        of_sinks = gradient_of_sinks(grad_output, output, normalizer, sinks[0]) if sinks else None
        return grads[0], grads[1], grads[2], of_sinks, None, None


def heads_first(values: Tensor) -> Tensor:
    """Turn [n, heads, ...] into [1, heads, n, ...]."""
    return values.unsqueeze(0).transpose(1, 2)


def tokens_first(values: Tensor) -> Tensor:
    """Turn [1, heads, n, ...] into [n, heads, ...]."""
    return values.transpose(1, 2).squeeze(0)
