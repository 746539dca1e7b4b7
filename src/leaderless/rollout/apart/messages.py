"""What a rank and its engine say to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

CHECKSUM_WORDS = 1 << 22
"""Words of eight bytes that are added up at a time."""


@dataclass(frozen=True)
class Settings:
    """What vLLM is started with.

    Attributes:
        model: Folder or hub name; only its shapes are read, weights come later.
        revision: Of a model of the hub.
        trust_remote_code: Whether code that comes with the model may run.
        dtype: Of weights and of what is computed.
        max_tokens: Longest sequence, prompt and response.
        max_sequences: Decoded at the same time.
        memory_fraction: Of an accelerator's memory, for weights and KV cache.
        kv_cache_bytes: Of the KV cache; None takes what the fraction leaves.
        enable_graphs: Compile the model, and capture its passes.
        is_one_of_many: It shares its process group with engines of other ranks, which are made at the same time.
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
        """Of the weights."""
        return torch_dtype(self.dtype)


@dataclass(frozen=True)
class Ask:
    """One response that is wanted.

    Attributes:
        id: By which it is known.
        prompt: Token ids.
        max_tokens: A response that reaches this length is cut.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_p: Keep the smallest set of tokens that reaches this probability.
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest.
        seed: Of the noise of this response.
        end_tokens: Each of them ends it.
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
    """What a response has got.

    Attributes:
        id: Of the response.
        tokens: New token ids.
        log_probs: Of each of them, under the distribution that it was drawn from.
        finish_reason: `stop` or `length`; None where it goes on.
        policy_version: Of the weights that sampled them.
    """

    id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    policy_version: int


@dataclass(frozen=True)
class Piece:
    """A weight in a bucket.

    Attributes:
        name: In `transformers`.
        dtype: As torch calls it.
        shape: Of the whole weight.
        offset: Of its first byte in the bucket.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int

    def view(self, data: Tensor) -> Tensor:
        """The weight as a view of its bucket.

        Args:
            data: [bytes] uint8.
        """
        dtype = torch_dtype(self.dtype)
        num_bytes = math.prod(self.shape) * dtype.itemsize
        return data[self.offset : self.offset + num_bytes].view(dtype).view(tuple(self.shape))


def torch_dtype(name: str) -> torch.dtype:
    """A type of torch.

    Args:
        name: As `float32`.
    """
    return cast("torch.dtype", getattr(torch, name))


def checksum(data: Tensor) -> int:
    """A number that tells bytes from any others, as good as surely; computed where the bytes are.

    Words of eight bytes are multiplied by consecutive odd numbers and added up modulo 2^64. A single changed word
    always changes the sum.

    Args:
        data: [bytes] uint8, a multiple of eight of them.
    """
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    odd = torch.arange(1, 2 * CHECKSUM_WORDS, 2, device=data.device)[: len(words)]
    for first in range(0, len(words), CHECKSUM_WORDS):
        part = words[first : first + CHECKSUM_WORDS]
        total += (part * (odd[: len(part)] + 2 * first)).sum()
    return int(total)
