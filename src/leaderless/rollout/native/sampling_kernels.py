"""Drawing of tokens as two Triton kernels. Importing this needs Triton, which builds of torch for CUDA bring along.

Logits are read once, besides one chunk of each row; `sample_tokens` reads or writes as much six times. Tokens are the
same as from `sample_tokens` but for rounding: both search sums of the same chunks in the order of the vocabulary, first
sums of chunks, in float64, and then sums within one chunk. These differ:

- Weights of a chunk are relative to its own largest logit, and their float32 sum is multiplied by the weight of that.
- The GPU's exponential has a relative error of about 1e-6 at e^-16, and sums of a chunk are added in another order.
- Within a chunk, shares of its own sum are searched, so that the largest noise finds the last token that adds to it.

So cumulative probabilities differ by less than 1e-6, and a token only if the noise is as close to the end of one.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.rollout.native.sampling import CHUNK, write_drawn

CHUNKS = 16
"""Chunks that a program of the first kernel reads."""


@triton.jit  # type: ignore[untyped-decorator]
def sum_chunks(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    num_chunks: tl.tensor,
    factor: tl.tensor,
    chunk_size: tl.constexpr,
    chunks: tl.constexpr,
) -> None:
    """Write the largest logit of some chunks of a row, times a factor, and the sum of the weights relative to it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * chunks + tl.arange(0, chunks)
    token = chunk[:, None] * chunk_size + tl.arange(0, chunk_size)[None, :]
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")) * factor
    peak = tl.max(values, 1)
    # A chunk without any token has the sum 0, not the one of -inf - -inf.
    weights = tl.exp(values - tl.where(peak > float("-inf"), peak, 0.0)[:, None])
    is_there = chunk < num_chunks
    tl.store(peaks + row * num_chunks + chunk, peak, mask=is_there)
    tl.store(sums + row * num_chunks + chunk, tl.sum(weights, 1), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def find_token(  # noqa: PLR0913, PLR0917
    logits: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    noise: tl.tensor,
    drawn: tl.tensor,
    stride: tl.tensor,
    drawn_stride: tl.tensor,
    vocabulary: tl.tensor,
    num_chunks: tl.tensor,
    factor: tl.tensor,
    chunk_size: tl.constexpr,
    block: tl.constexpr,
    is_greedy: tl.constexpr,
) -> None:
    """Find the chunk and in it the token of a row, and write the token and the bits of its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, block)
    place = row * num_chunks + chunk
    tops = tl.load(peaks + place, mask=chunk < num_chunks, other=float("-inf"))
    peak = tl.max(tops, 0)
    parts = tl.load(sums + place, mask=chunk < num_chunks, other=0.0)
    parts = (parts * tl.exp(tops - peak)).to(tl.float64)
    ends = tl.cumsum(parts, 0)
    total = tl.sum(tl.where(chunk == block - 1, ends, 0.0), 0)  # NaN, unlike a maximum, if any number is
    threshold = tl.load(noise + row) * total
    if is_greedy:
        found = tl.min(tl.where(tops == peak, chunk, num_chunks - 1), 0)
    else:
        found = first_beyond(ends, parts, chunk, threshold, total, num_chunks)
    inside = tl.arange(0, chunk_size)
    token = found * chunk_size + inside
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")) * factor
    if is_greedy:
        spot = tl.min(tl.where(values == peak, inside, chunk_size - 1), 0)
    else:
        # Of the chunk, that share of its tokens lies before the threshold, whatever its sum was rounded to.
        before = tl.max(tl.where(chunk < found, ends, 0.0), 0)
        end = tl.sum(tl.where(chunk == found, ends, 0.0), 0)
        weights = tl.exp(values - peak).to(tl.float64)
        reached = tl.cumsum(weights, 0)
        whole = tl.max(reached, 0)
        spot = first_beyond(reached, weights, inside, (threshold - before) / (end - before) * whole, whole, chunk_size)
    # If logits are NaN, any token.
    chosen = tl.minimum(found * chunk_size + spot, vocabulary - 1)
    value = tl.load(logits + row * stride + chosen) * factor
    score = ((value - peak).to(tl.float64) - tl.log(total)).to(tl.float32)
    tl.store(drawn + row, chosen.to(tl.int64))
    tl.store(drawn + drawn_stride + row, score.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def first_beyond(
    ends: tl.tensor, parts: tl.tensor, number: tl.tensor, threshold: tl.tensor, total: tl.tensor, count: tl.tensor
) -> tl.tensor:
    """The first part that ends beyond a threshold, at most the last one that adds to the total."""
    is_some = parts > 0
    last = tl.min(tl.where(is_some & (ends >= total), number, count - 1), 0)
    return tl.min(tl.where(is_some & (ends > threshold), number, last), 0)


def draw_with_kernels(logits: Tensor, noise: Tensor, distribution: SamplingConfig, drawn: Tensor) -> None:
    """Do what `write_drawn` does with two kernels, where all tokens may be drawn."""
    if distribution.temperature != 0 and distribution.is_truncated:
        write_drawn(logits, noise, distribution, drawn)
        return
    logits, noise = logits.contiguous(), noise.contiguous()
    count, vocabulary = logits.shape
    num_chunks = triton.cdiv(vocabulary, CHUNK)
    peaks, sums = logits.new_empty(2, count, num_chunks)
    is_greedy = distribution.temperature == 0
    # As torch divides by a number on a GPU.
    factor = 1.0 if is_greedy else float(np.float32(1) / np.float32(distribution.temperature))
    sizes = vocabulary, num_chunks, factor, CHUNK
    sum_chunks[count, triton.cdiv(num_chunks, CHUNKS)](logits, peaks, sums, logits.stride(0), *sizes, CHUNKS)
    block = triton.next_power_of_2(num_chunks)
    strides = logits.stride(0), drawn.stride(0)
    find_token[(count,)](logits, peaks, sums, noise, drawn, *strides, *sizes, block, is_greedy)
