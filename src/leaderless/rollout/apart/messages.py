"""Messages between a rank and its engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

CHECKSUM_WORDS = 1 << 22
"""Most words of eight bytes that are added up at a time."""


@dataclass(frozen=True)
class Settings:
    """Settings of an engine.

    Attributes:
        model: Folder or hub name; only shapes are read from it, weights come later.
        revision: Revision on the hub.
        trust_remote_code: Whether code that comes with the model may run.
        dtype: Type of weights and activations.
        max_tokens: Most tokens of a prompt with its response.
        max_sequences: Most responses that are decoded at the same time.
        memory_fraction: Share of an accelerator's memory for weights and KV cache.
        kv_cache_bytes: Size of the KV cache; None for everything that the fraction leaves.
        enable_graphs: Whether to compile the model and capture its passes.
        is_one_of_many: Whether engines of other ranks share the process group and are made at the same time.
    """

    model: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    max_tokens: int
    max_sequences: int
    memory_fraction: float
    kv_cache_bytes: int | None
    enable_graphs: bool
    is_one_of_many: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch_dtype(self.dtype)


@dataclass(frozen=True)
class Ask:
    """A request for one response.

    Attributes:
        id: Number of the response.
        prompt: Token ids.
        max_tokens: Length at which the response is cut.
        temperature: Divisor of the logits; 0 for the likeliest token.
        top_p: Probability that the smallest set of kept tokens reaches.
        top_k: Number of tokens to keep; 0 for all.
        min_p: Smallest probability to keep, relative to the likeliest token.
        seed: Seed of the noise of this response.
        end_tokens: Tokens that end the response.
    """

    id: int
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    end_tokens: Sequence[int]


@dataclass(frozen=True)
class Gain:
    """New tokens of a response.

    Attributes:
        id: Number of the response.
        tokens: New token ids.
        log_probs: Log-probability of each token under the distribution it was drawn from.
        finish_reason: `stop` or `length`; None while the response continues.
        policy_version: Version of the weights that sampled the tokens.
    """

    id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    policy_version: int


@dataclass(frozen=True)
class PackedWeight:
    """A weight in a bucket.

    Attributes:
        name: Name in `transformers`.
        dtype: Name of its type in torch.
        shape: Shape of the whole weight.
        offset: Index of its first byte in the bucket.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int

    def view(self, data: Tensor) -> Tensor:
        """View the weight in the [bytes] uint8 of its bucket."""
        dtype = torch_dtype(self.dtype)
        num_bytes = math.prod(self.shape) * dtype.itemsize
        return data[self.offset : self.offset + num_bytes].view(dtype).view(tuple(self.shape))


def torch_dtype(name: str) -> torch.dtype:
    """Look up a type of torch, such as `float32`."""
    return cast("torch.dtype", getattr(torch, name))


def checksum(data: Tensor) -> int:
    """Compute a checksum on the device that holds the bytes.

    Words of eight bytes are multiplied by consecutive odd numbers and added up modulo 2^64. A single changed word
    always changes the sum.

    Args:
        data: [bytes] uint8; the number of bytes is a multiple of eight.
    """
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    odd = torch.arange(1, 2 * CHECKSUM_WORDS, 2, device=data.device)[: len(words)]
    for first in range(0, len(words), CHECKSUM_WORDS):
        part = words[first : first + CHECKSUM_WORDS]
        total += (part * (odd[: len(part)] + 2 * first)).sum()
    return int(total)
