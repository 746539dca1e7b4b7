"""Forms of attention: which tokens see which, bounds of scores, and sinks; and the pass in which a layer is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from leaderless.planner.memory.attention_kinds import FULL, AttentionKind

if TYPE_CHECKING:
    from leaderless.models.attention.indexed import KeyChoice
    from leaderless.models.attention.packed import Attention


class AttentionForm(NamedTuple):
    """Form of the attention of a layer.

    Attributes:
        scale: Factor of the dot products.
        kind: Tokens that attend to one another, and the bound of their scores.
        sinks: [query_heads] scores of a key with the value 0, to which each token attends, too; None for no such key.
        chosen: Keys that an indexer chooses, for a layer that has one.
    """

    scale: float
    kind: AttentionKind = FULL
    sinks: Tensor | None = None
    chosen: KeyChoice | None = None

    @property
    def is_plain(self) -> bool:
        """Whether any kernel for causal attention computes it."""
        return self.kind.sees_all and self.kind.softcap is None and self.sinks is None

    def is_plain_for(self, length: int) -> bool:
        """Whether any kernel for causal attention computes it for sequences of at most some tokens."""
        sees_all = self.kind.first_key(length - 1) == 0 and not self.kind.is_indexed
        return sees_all and self.kind.softcap is None and self.sinks is None

    def part(self, place: int, count: int) -> AttentionForm:
        """The form of a part of the heads, of which there are several of equal size."""
        return self if self.sinks is None else self._replace(sinks=self.sinks.chunk(count)[place])

    def added_sink(self, output: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the sink, too, if there is one.

        Args:
            output: [T, query_heads, head_dim] results of attention to all keys but the sink.
            normalizer: [T, query_heads] logarithms of the sums of the exponentials of their scores.

        Returns:
            The same with the sink.
        """
        if self.sinks is None:
            return output, normalizer
        whole = torch.logaddexp(normalizer, self.sinks.to(normalizer.dtype))
        return (output * (normalizer - whole).exp_().unsqueeze(-1)).to(output.dtype), whole


def gradient_of_sinks(grad_output: Tensor, output: Tensor, normalizer: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of [query_heads] sinks, from results with them: -sum over tokens of p (dL/do . o), p = their share.

    Outputs are [T, query_heads, head_dim], normalizers [T, query_heads].
    """
    dtype = normalizer.dtype
    share = (sinks.to(dtype) - normalizer).exp_()
    slope: Tensor = -(share * torch.linalg.vecdot(grad_output.to(dtype), output.to(dtype))).sum(0)
    return slope.to(sinks.dtype)


def seen_keys(kind: AttentionKind, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether queries attend to keys, by their positions in a sequence, [..., queries] and [..., keys] int64."""
    queries, keys = queries.unsqueeze(-1), keys.unsqueeze(-2)
    is_seen = keys <= queries
    if kind.window is not None:
        is_seen &= keys > queries - kind.window
    if kind.chunk is not None:
        is_seen &= keys // kind.chunk == queries // kind.chunk
    return is_seen


def as_scores(is_seen: Tensor) -> Tensor:
    """The float32 numbers that are added to scores: 0 where a key is seen, and minus infinity elsewhere."""
    return torch.zeros(is_seen.shape, device=is_seen.device).masked_fill_(~is_seen, -torch.inf)


class LayerPass(NamedTuple):
    """A pass through the layers of a model.

    Attributes:
        attention: Attention of the tokens.
        kinds: Kind of attention of each layer.
        positions: [..., T] int64 positions of the tokens, as the layers take them.
    """

    attention: Attention
    kinds: Sequence[AttentionKind]
    positions: Tensor


# Not all layers of `transformers` pass on what their attention needs.
_CURRENT: ContextVar[LayerPass | None] = ContextVar("pass", default=None)


def current_pass() -> LayerPass | None:
    """The pass in which a layer is called; None outside of one."""
    return _CURRENT.get()


@contextmanager
def passing(now: LayerPass | None) -> Iterator[None]:
    """Call layers in a pass, or outside of one."""
    token = _CURRENT.set(now)
    try:
        yield
    finally:
        _CURRENT.reset(token)
