"""Attention to keys that an indexer chooses: each token attends to those before it that fit best.

An indexer of `transformers` scores all keys of a sequence for each of its tokens, without a gradient: training leaves
its weights as they are. It is called with each sequence of a pass alone, and with its prompt, so that it chooses among
the keys of this sequence. Sources: DeepSeek-V3.2 (arXiv 2512.02556), whose indexer chooses tokens, and Qwen's sparse
attention, whose indexer chooses blocks of them. Later layers may use the same choice (arXiv 2603.12201).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from leaderless.models.attention.blocks import LengthBuckets, SequenceCopies
from leaderless.models.attention.form import as_scores, current_pass


@dataclass(frozen=True)
class SequenceMask:
    """A stand-in for the mask of a pass, of which each sequence has its own: layers index it, and combine it.

    Attributes:
        ndim: Number of dimensions of the mask.
    """

    ndim: int = 4
    dtype: ClassVar[torch.dtype] = torch.bool

    def __getitem__(self, places: tuple[int | slice, ...]) -> SequenceMask:
        return SequenceMask(self.ndim - sum(isinstance(place, int) for place in places))

    def __and__(self, chosen: KeyChoice) -> KeyChoice:
        return chosen

    def of(self, is_seen: Tensor) -> Tensor:
        """The mask of a sequence, [1, ..., queries, keys], by which keys are seen, [queries, keys]."""
        return is_seen[(None,) * (self.ndim - 2)]


@dataclass(frozen=True)
class ScoreMasks:
    """Numbers that are added to scores, made each time that they are needed: they take four times the memory.

    Attributes:
        seen: Whether tokens see keys, [count, 1, longest, longest] bool by bucket.
    """

    seen: Sequence[Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return map(as_scores, self.seen)


class KeyChoice:
    """The keys to which the tokens of a pass attend, in one layer or in several."""

    def __init__(self, index: Callable[..., Tensor], given: Sequence[object], named: Mapping[str, object]) -> None:
        """Keep the arguments with which a layer calls its indexer, where tensors are [1, T, ...]."""
        self._index, self._given, self._named = index, given, named
        self._seen: list[Tensor] = []

    def masks(self, copies: SequenceCopies, buckets: LengthBuckets) -> ScoreMasks:
        """Find out which keys are seen in the sequences of each bucket, unless it is known already."""
        starts = {block.own.start: place for place, block in enumerate(copies.blocks)}
        for bucket in buckets.all[len(self._seen) :]:
            seen = torch.zeros(bucket.count, 1, bucket.longest, bucket.longest, dtype=torch.bool)
            seen = seen.to(bucket.tokens.device)
            seen[..., 0] = True  # for padding, so that its softmax is a number
            for own, begin in zip(seen[:, 0], bucket.begins.tolist(), strict=True):
                found = self._seen_in(copies.sequences[starts[begin]])
                own[: len(found), : len(found)] = found
            self._seen.append(seen)
        self._given, self._named = (), {}  # which take memory
        return ScoreMasks(self._seen)

    @torch.no_grad()
    def _seen_in(self, tokens: Tensor) -> Tensor:
        """Whether tokens of a sequence see one another, [n, n] bool, by their [n] int64 places in the pass."""
        is_before = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril()

        def part(value: object) -> object:
            if isinstance(value, Tensor):
                return value.index_select(1, tokens)
            if isinstance(value, tuple):
                return tuple(map(part, value))
            return value.of(is_before) if isinstance(value, SequenceMask) else value

        found = self._index(*map(part, self._given), **{name: part(value) for name, value in self._named.items()})
        if found.dtype == torch.bool:  # [1, 1, n, n]
            return found[0, 0] & is_before
        return torch.zeros_like(is_before).scatter_(1, found[0].long(), value=True) & is_before  # [1, n, top k] places


class Indexer:
    """The function `forward` of an indexer, in passes and outside of them."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward

    def __call__(self, *given: object, **named: object) -> KeyChoice | Tensor:
        """Choose keys when layers attend to them; outside of a pass, as `transformers` does."""
        if current_pass() is None:
            found: Tensor = self._forward(*given, **named)
            return found
        return KeyChoice(self._forward, _detached(given), {name: _detached(value) for name, value in named.items()})


class IndexedAttention:
    """The function `forward` of attention with an indexer, in passes and outside of them."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *given: object, **named: object) -> Any:  # noqa: ANN401 - whatever the layer returns
        """Attend; in a pass, with a mask for the indexer."""
        if current_pass() is not None:
            named["attention_mask"] = SequenceMask()
        return self._forward(*given, **named)


def choose_in_passes(model: nn.Module) -> None:
    """Have the indexers of a model choose keys in packed passes, from now on."""
    for module in model.modules():
        if (indexer := indexer_of(module)) is not None and not isinstance(indexer.forward, Indexer):
            indexer.forward, module.forward = Indexer(indexer), IndexedAttention(module)


def indexer_of(module: nn.Module) -> nn.Module | None:
    """The indexer of a module of `transformers` with attention; None if it has none, or none of a known kind."""
    indexer = getattr(module, "indexer", None)
    if not isinstance(indexer, nn.Module) or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    is_known = isinstance(indexer.forward, Indexer) or "attention_mask" in inspect.signature(indexer.forward).parameters
    return indexer if is_known else None


def _detached(value: Any) -> Any:  # noqa: ANN401 - any argument of an indexer
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value.detach() if isinstance(value, Tensor) else value
