"""Attention of models whose prompts are read in both directions, as PaliGemma's: prefix language models.

Each token of a prompt attends to all of the prompt. A continuation attends to the prompt, and causally to itself.
Source: PaliGemma, arXiv 2407.07726, figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless.models.attention.packed import attend_padded
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.uploads import placed


class _Continuations:
    """The continuations of a prompt, padded to the longest, which attend in one call."""

    def __init__(self, begin: int, family: Family, device: torch.device) -> None:
        counts = torch.tensor(family.continuations)[:, None]
        ends = begin + family.prompt + counts.cumsum(0)
        steps = torch.arange(int(counts.max()))[None, :]
        # Padding repeats the last token; its keys come after those that real tokens attend to.
        self._rows = placed(torch.minimum(ends - counts + steps, ends - 1), device)
        self._real = placed((steps < counts).flatten().nonzero().squeeze(1), device)
        places = torch.arange(family.prompt + steps.shape[1])
        self._is_seen = placed((places <= family.prompt + steps[0, :, None])[None, None], device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, prompt: slice, scale: float) -> Tensor:
        """Results of all continuations, [tokens, query_heads, head_dim]."""
        count, rows = len(self._rows), self._rows.flatten()
        queries, *own = (
            one.index_select(0, rows).view(*self._rows.shape, *one.shape[1:]) for one in (query, key, value)
        )
        before = (one[prompt].expand(count, *one[prompt].shape) for one in (key, value))
        keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(before, own, strict=True))
        found = attend_padded(queries.transpose(1, 2), keys, values, self._is_seen.expand(count, -1, -1, -1), scale)
        return found.transpose(1, 2).flatten(0, 1).index_select(0, self._real)


class PrefixAttention:
    """Attention in which each token of a prompt attends to all of the prompt; see the module."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        self.longest = max(family.longest for family in families)
        self._families: list[tuple[slice, _Continuations | None]] = []
        begin = 0
        for family in families:
            after = _Continuations(begin, family, device) if family.continuations else None
            self._families.append((slice(begin, begin + family.prompt), after))
            begin += family.num_tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """Attend within each prompt, then from its continuations to the prompt and themselves."""
        results: list[Tensor] = []
        for prompt, after in self._families:
            q, k, v = (one[prompt].transpose(0, 1)[None] for one in (query, key, value))
            length = prompt.stop - prompt.start
            is_seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device)
            results.append(attend_padded(q, k, v, is_seen, scale)[0].transpose(0, 1))
            if after is not None:
                results.append(after.attend(query, key, value, prompt, scale))
        return torch.cat(results)
