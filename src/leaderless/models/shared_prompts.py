"""Attention over prompts that stand once in front of all of their continuations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from leaderless.models.attention import Attention, Buckets, attend_in_buckets
from leaderless.models.cpu_attention import attend_on_cpu


@dataclass(frozen=True)
class Family:
    """A prompt and what follows it, as numbers of tokens.

    Its tokens lie one behind the other: the prompt, then each continuation. A continuation attends to the prompt and to
    itself, never to its siblings.

    Attributes:
        prompt: At least 1.
        continuations: Each at least 1; there may be none.
    """

    prompt: int
    continuations: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Of the prompt, once, and of all continuations."""
        return self.prompt + sum(self.continuations)

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longest continuation."""
        return self.prompt + max(self.continuations, default=0)


def attention_over(families: Sequence[Family], device: torch.device, compute_dtype: torch.dtype) -> Attention:
    """The fastest attention there is for a pass.

    Args:
        families: One behind the other.
        device: Where the pass runs.
        compute_dtype: Of queries, keys and values.
    """
    if device.type == "cpu":
        return CpuAttention(families)
    if device.type == "cuda" and compute_dtype in {torch.bfloat16, torch.float16}:
        return VarlenAttention(families, device)
    return ExpandedAttention(families, device)


@dataclass(frozen=True)
class _Run:
    """Tokens that lie one behind the other, and those of the prompt before them."""

    before: range
    own: range

    def keys(self) -> Tensor:
        """[n] int64: all tokens that the last one attends to."""
        return torch.tensor([*self.before, *self.own])


def _runs(families: Sequence[Family]) -> Iterator[_Run]:
    """Every token once, in order; a single continuation is one run with its prompt."""
    end = 0
    for family in families:
        begin, end = end, end + family.prompt
        if len(family.continuations) == 1:
            end += family.continuations[0]
            yield _Run(range(0), range(begin, end))
            continue
        prompt = range(begin, end)
        yield _Run(range(0), prompt)
        for length in family.continuations:
            yield _Run(prompt, range(end, end + length))
            end += length


class CpuAttention:
    """Each token attends to its own run, each continuation to its whole prompt besides, and the two are joined."""

    def __init__(self, families: Sequence[Family]) -> None:
        """Plan the calls.

        Args:
            families: One behind the other.
        """
        self.longest = max(family.longest for family in families)
        device = torch.device("cpu")
        runs = list(_runs(families))
        sequences = [torch.arange(run.own.start, run.own.stop) for run in runs]
        self._buckets = Buckets(sequences, sum(family.num_tokens for family in families), device)
        self._crossings: list[tuple[slice, slice]] = []
        begin = 0
        for family in families:
            end, middle = begin + family.num_tokens, begin + family.prompt
            if len(family.continuations) > 1:
                self._crossings.append((slice(begin, middle), slice(middle, end)))
            begin = end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """See `Attention`."""
        return attend_on_cpu(query, key, value, self._buckets, self._crossings, scale)


class VarlenAttention:
    """FlashAttention over runs of any length; the keys of a prompt are laid before those of each continuation."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        """Plan the call.

        Args:
            families: One behind the other.
            device: Where the pass runs.
        """
        self.longest = max(family.longest for family in families)
        runs = list(_runs(families))
        lengths = torch.tensor([[0, 0], *([len(run.own), len(run.before) + len(run.own)] for run in runs)])
        self._query_ends, self._key_ends = lengths.cumsum(0).int().t().contiguous().to(device)
        self._longest_query, self._longest_key = lengths.amax(0).tolist()
        is_shared = any(run.before for run in runs)
        self._keys = torch.cat([run.keys() for run in runs]).to(device) if is_shared else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """See `Attention`. Where there are more keys than queries, the last query meets the last key."""
        if self._keys is not None:
            key, value = key.index_select(0, self._keys), value.index_select(0, self._keys)
        output = varlen_attn(
            query,
            key,
            value,
            self._query_ends,
            self._key_ends,
            self._longest_query,
            self._longest_key,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return cast("Tensor", output)


class ExpandedAttention:
    """Each continuation with its prompt is a sequence of its own, as if the prompt were there as often."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        """Plan the calls.

        Args:
            families: One behind the other.
            device: Where the pass runs.
        """
        self.longest = max(family.longest for family in families)
        sequences = [run.keys() for run in _runs(families)]
        self._buckets = Buckets(sequences, sum(family.num_tokens for family in families), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """See `Attention`."""
        return attend_in_buckets(self._buckets, query, key, value, scale)
