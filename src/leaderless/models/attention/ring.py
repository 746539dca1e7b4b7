"""Context parallelism of any size: keys and values go around a ring of ranks, and each attends to what it has.

The tokens of a pass are cut into twice as many chunks as there are ranks, and each rank has one from the front and one
from the back, so that causal attention is as much work for each (zigzag). Chunks of keys and values pass from rank to
rank; results for them are joined by their normalizers (Liu et al., "Ring Attention with Blockwise Transformers",
arXiv 2310.01889), which is exact. In the backward pass their gradients go around with them, and end where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from leaderless.distributed.in_flight import PendingMessage
from leaderless.models.attention.blocks import LengthBuckets, PromptBlock, following
from leaderless.models.attention.form import AttentionForm, gradient_of_sinks
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.recurrence import Mixer
from leaderless.models.attention.shared_prompts import Family, blocks_of
from leaderless.models.attention.some_keys import Crossing, attend_within, gradients_within
from leaderless.models.parallel.context import ContextParallel

ROUND = "keys and values of other parts of a pass"


class RingParallel(ContextParallel):
    """The ranks that divide the tokens of a pass into parts of equal size, of which each has two chunks."""

    @override
    def chunks(self, place: int) -> tuple[int, ...]:
        return place, 2 * self.size - 1 - place

    @override
    def attention(self, families: Sequence[Family], device: torch.device, compute_dtype: torch.dtype) -> Attention:
        return RingAttention(families, self, device)


class RingAttention:
    """Attention of a rank's tokens to the tokens of all ranks, in parts that need no mask."""

    def __init__(self, families: Sequence[Family], ranks: RingParallel, device: torch.device) -> None:
        """Plan the calls for consecutive families, whose tokens fill all chunks."""
        self.peers, self.place = ranks.peers, ranks.place
        length = sum(family.num_tokens for family in families) // (2 * ranks.size)
        own = ranks.chunks(ranks.place)
        blocks = [*blocks_of(families)]
        pieces = [_cut(block.own, chunk, length) for chunk in own for block in blocks]
        self.diagonal = LengthBuckets([len(piece) for piece in pieces if piece], device)
        self.crossings = [
            [
                _crossing(queries, keys, (i, a), (j, b), length)
                for i, a in enumerate(own)
                for j, b in enumerate(ranks.chunks(place))
                for queries, keys in _pairs(blocks, a, b, length)
                if queries and keys
            ]
            for place in range(ranks.size)
        ]

    def around(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The values of each rank by its place, from this one's on, while the next rank's are on their way."""
        for step in range(self.peers.size):
            passing = self.peers.pass_on(values, ROUND) if step < self.peers.size - 1 else None
            yield (self.place - step) % self.peers.size, values
            if passing is not None:
                values = passing.wait()

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Fail: such a model is refused when ranks divide its tokens."""
        raise AssertionError(f"layer {layer} reads {len(hidden)} tokens of a part of a pass by {mixer}")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:  # noqa: ARG002
        """Attend from this rank's tokens, of which there are T, to the keys that pass by from rank to rank."""
        assert form.kind.sees_all, "refused when the model was divided"
        output: Tensor = _Ring.apply(query, key, value, form.sinks, self, form)  # type: ignore[no-untyped-call]
        return output


def _cut(tokens: range, chunk: int, length: int) -> range:
    """The part of some tokens that is in a chunk."""
    return range(max(tokens.start, chunk * length), min(tokens.stop, (chunk + 1) * length))


def _pairs(blocks: Sequence[PromptBlock], a: int, b: int, length: int) -> Iterator[tuple[range, range]]:
    """Queries in chunk `a` and keys in chunk `b` that each of them sees, without its own piece of a block."""
    if b > a:
        return
    for keys, queries in following(blocks).items():
        yield _cut(queries, a, length), _cut(keys, b, length)
    if b < a:
        for block in blocks:
            yield _cut(block.own, a, length), _cut(block.own, b, length)


def _crossing(queries: range, keys: range, of_query: tuple[int, int], of_key: tuple[int, int], length: int) -> Crossing:
    """Tokens that each attend to all of some others, by their places among the tokens of their ranks.

    Their chunks are given by the place among the chunks of a rank and by number.
    """

    def local(tokens: range, place: int, chunk: int) -> slice:
        offset = (place - chunk) * length
        return slice(tokens.start + offset, tokens.stop + offset)

    return Crossing(local(keys, *of_key), local(queries, *of_query))


class _Context(FunctionCtx):
    """Everything the backward pass needs from the forward pass."""

    saved_tensors: tuple[Tensor, ...]
    plan: RingAttention
    form: AttentionForm


class _Ring(torch.autograd.Function):
    """Attention round the ring, and its gradient; results are added up in at least float32."""

    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,  # of the form, so that they get a gradient
        plan: RingAttention,
        form: AttentionForm,
    ) -> Tensor:
        output, normalizers = attend_within(form, plan.diagonal, query, key, value)
        output = output.to(normalizers.dtype)
        for place, pair in plan.around(torch.stack([key, value])):
            for crossing in plan.crossings[place]:
                crossing.attend(form, query, pair[0], pair[1], output, normalizers)
        output, normalizers = form.added_sink(output, normalizers)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normalizers, *(() if sinks is None else (sinks,)))
        ctx.plan, ctx.form = plan, form
        return output

    @staticmethod
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, output, normalizers, *sinks = ctx.saved_tensors
        plan, form = ctx.plan, ctx.form
        whole = output, normalizers
        first = gradients_within(form, plan.diagonal, grad_output, query, key, value, *whole)
        grad_query, grad_pair = first[0].to(normalizers.dtype), torch.stack(first[1:]).to(normalizers.dtype)
        passing: PendingMessage | None = None
        for place, pair in plan.around(torch.stack([key, value])):
            if passing is not None:
                grad_pair = passing.wait()
            for crossing in plan.crossings[place]:
                grads = grad_query, grad_pair[0], grad_pair[1]
                crossing.add_gradients(form, grad_output, query, pair[0], pair[1], *whole, grads)
            passing = plan.peers.pass_on(grad_pair, ROUND)
        assert passing is not None
        of_key, of_value = passing.wait().to(key.dtype)
        of_sinks = gradient_of_sinks(grad_output, output, normalizers, sinks[0]) if sinks else None
        return grad_query.to(query.dtype), of_key, of_value, of_sinks, None, None
