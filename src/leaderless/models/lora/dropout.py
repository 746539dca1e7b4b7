"""Dropout of the inputs of adapters, as a function of tokens and layers alone.

Whether a number is dropped follows from the run's seed, the update, what the token belongs to, its position, the layer
and the feature. So neither micro-batches and their order nor ranks that divide rows, tokens or layers change anything,
and a layer that is recomputed drops the same numbers. For the backward pass, only a key per token is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.recurrence import Mixer
from leaderless.planner.memory.limits import MAX_WORDS

_CURRENT = "current_pass"
_GOLDEN, _MIX_1, _MIX_2 = (
    int.from_bytes(constant.to_bytes(8, "big"), "big", signed=True)
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mixed(state: Tensor) -> Tensor:
    """One output of SplitMix64 for each state, int64 (Steele et al., OOPSLA 2014); sums and products wrap around."""
    state = state + _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        state ^= (state >> shift) & ((1 << (64 - shift)) - 1)
        state *= factor
    return state


def key_of(name: str) -> int:
    """Hash of a name, int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


@dataclass(frozen=True)
class Dropout:
    """Dropout of one pass.

    Attributes:
        keys: Keys of the tokens of the pass, [T] int64.
        rate: Probability that a number is dropped; others are divided by 1 - rate.
    """

    keys: Tensor
    rate: float

    def dropped(self, layer: int, features: range) -> Tensor:
        """Which inputs a layer drops, [T, features] bool.

        Each word of SplitMix64, from a state that follows from token and layer, decides about two features.

        Args:
            layer: Key of the layer.
            features: Range of its inputs; a part of all where ranks divide them.
        """
        states = mixed(self.keys ^ layer)
        words = torch.arange(features.start // 2, (features.stop + 1) // 2, device=states.device) * _GOLDEN
        bound, skipped = min(round(self.rate * 2**32) - 2**31, 2**31 - 1), features.start % 2
        found = [
            mixed(part[:, None] + words).view(torch.int32)[:, skipped : skipped + len(features)] < bound
            for part in torch.split(states, max(1, MAX_WORDS // max(1, len(words))))
        ]
        return torch.cat(found)


@dataclass(frozen=True)
class DroppingAttention:
    """The attention of a pass in which adapters drop some of their inputs.

    Every layer receives the attention of its pass, also when it is recomputed, and with it the dropout.
    """

    attention: Attention
    dropout: Dropout

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Read as the pass does without dropout: adapters of such layers have none."""
        return self.attention.recur(layer, mixer, hidden)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attend as the pass does without dropout, which is for adapters alone."""
        return self.attention.attend(layer, query, key, value, form)


@dataclass
class CurrentPass:
    """The dropout of the pass that a decoder layer computes, if there is any; its adapters look it up here."""

    dropout: Dropout | None = None

    @contextmanager
    def drops(self, dropout: Dropout | None) -> Iterator[None]:
        """Set the dropout while the layer is recomputed, as in a backward pass."""
        before, self.dropout = self.dropout, dropout
        try:
            yield
        finally:
            self.dropout = before


def watch_passes(layer: nn.Module) -> CurrentPass:
    """Keep track of the dropout of each pass through a decoder layer, from now on."""
    current = CurrentPass()

    def begin(_: nn.Module, __: tuple[object, ...], named: dict[str, object]) -> None:
        if (attention := named.get("attention")) is None:
            raise RuntimeError(f"a layer of type {type(layer).__name__} was called without the attention of its pass")
        current.dropout = attention.dropout if isinstance(attention, DroppingAttention) else None

    def end(*_: object) -> None:
        current.dropout = None

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.register_forward_hook(end, always_call=True)
    setattr(layer, _CURRENT, current)
    return current


def pass_of(layer: nn.Module) -> CurrentPass:
    """The current pass of a decoder layer; one without dropout if `watch_passes` has not seen the layer."""
    return cast("CurrentPass", getattr(layer, _CURRENT, None) or CurrentPass())


def dropped_product(values: Tensor, matrix: Tensor, dropout: Dropout, layer: int, first: int) -> Tensor:
    """The product of values with a matrix, after dropout of the values.

    Formula: dropout(x) A^T, where dropout(x) is 0 with probability p and else x / (1 - p), independently for each
    number. Source: LoRA (arXiv 2106.09685, appendix D) and `peft`, whose adapters compute B A dropout(x). Deviation:
    keys decide what is dropped, not a random generator.

    Args:
        values: [..., T, inputs], T tokens in all.
        matrix: [rank, inputs].
        dropout: Rate and keys of what is dropped in the pass.
        layer: Key of the layer.
        first: Place of the first of these inputs among all inputs of the layer.
    """
    result: Tensor = _DroppedProduct.apply(values, matrix, dropout, layer, first)  # type: ignore[no-untyped-call]
    return result


class _Context(FunctionCtx):
    find: Callable[[], Tensor]
    factor: float
    needs_input_grad: tuple[bool, ...]


class _DroppedProduct(torch.autograd.Function):
    """The product and its gradient; the backward pass recomputes which values are dropped, to save memory."""

    @staticmethod
    def forward(ctx: _Context, values: Tensor, matrix: Tensor, dropout: Dropout, layer: int, first: int) -> Tensor:
        ctx.save_for_backward(values, matrix)
        ctx.find = partial(dropout.dropped, layer, range(first, first + values.shape[-1]))
        ctx.factor = 1 / (1 - dropout.rate)
        return linear(values.masked_fill(ctx.find().view_as(values), 0), matrix) * ctx.factor

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, matrix = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)  # type: ignore[attr-defined]
        dropped, grad = ctx.find().view_as(values), grad * ctx.factor
        for_matrix = for_values = None
        if ctx.needs_input_grad[1]:
            rows = values.masked_fill(dropped, 0).flatten(0, -2)
            for_matrix = grad.flatten(0, -2).t() @ rows
        if ctx.needs_input_grad[0]:
            for_values = (grad @ matrix).masked_fill_(dropped, 0)
        return for_values, for_matrix, None, None, None
