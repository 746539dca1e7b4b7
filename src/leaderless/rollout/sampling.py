"""The next token: which ones may be drawn, and which one is, with noise that depends on the sample alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig

_GOLDEN, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64 (Steele, Lea and Flood, 2014)."""
CHUNK = 256
"""Tokens of the vocabulary that are first looked at together."""


def uniform_noise(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """A number between 0 and 1 for each token, fixed by seed, sample and position.

    However samples are spread over ranks, batches and steps of decoding, the same token meets the same number.

    Args:
        seed: Of the run.
        sample_ids: [n] int64.
        positions: [n] int64, place of the token in its response, from 0.

    Returns:
        [n] float64, at least 0 and below 1.
    """
    # A few numbers and many steps: NumPy has done each before torch, or an accelerator, has begun it.
    ids, places = (values.cpu().numpy().view(np.uint64) for values in (sample_ids, positions))
    key = _mix(np.array([seed], dtype=np.int64).view(np.uint64))
    state = _mix(_mix(ids ^ key) ^ (places + np.uint64(1)))
    noise = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(noise).to(sample_ids.device)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 output function; products wrap around."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def sample_tokens(logits: Tensor, noise: Tensor, distribution: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, by inverting the cumulative distribution at the row's noise.

    Args:
        logits: [n, vocabulary] float32.
        noise: [n] float64, at least 0 and below 1.
        distribution: Temperature, and which tokens may be drawn.

    Returns:
        [n] int64 tokens, and [n] float32 log-probabilities of each under the distribution that it was drawn from; for
        temperature 0 the likeliest token, and its log-probability at temperature 1.
    """
    if distribution.temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, _log_prob(logits, tokens)
    if distribution.temperature != 1:
        logits = logits / distribution.temperature
    if distribution.is_truncated:
        logits = truncate(logits, distribution)
    peak = logits.amax(dim=-1, keepdim=True)
    tokens, total = _invert(_weights(logits, peak), noise.unsqueeze(1))
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)  # of logits that are no numbers, some token
    return tokens.squeeze(1), (logits.gather(1, tokens) - peak - total.log()).squeeze(1).float()


def _weights(logits: Tensor, peak: Tensor) -> Tensor:
    """What each token weighs beside the likeliest, [n, chunks, CHUNK]; nothing behind the vocabulary."""
    count, vocabulary = logits.shape
    weights = logits.new_empty(count, -(-vocabulary // CHUNK) * CHUNK)
    weights[:, vocabulary:] = 0
    torch.sub(logits, peak, out=weights[:, :vocabulary]).exp_()
    return weights.view(count, -1, CHUNK)


def _invert(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The place at which cumulative weights pass a fraction of their sum: first which chunk, then where in it.

    Sums of chunks are float32; all that is summed up from them is float64.

    Args:
        weights: [n, chunks, CHUNK] float32.
        noise: [n, 1] float64, the fraction.

    Returns:
        [n, 1] int64 places, and [n, 1] float64 sums of all weights.
    """
    ends = torch.nn.functional.pad(weights.sum(dim=-1).double().cumsum(dim=-1), (1, 0))
    total = ends[:, -1:].contiguous()
    threshold = noise * total
    chunk = _search(ends[:, 1:].contiguous(), threshold)
    inside = weights.gather(1, chunk.unsqueeze(2).expand(-1, -1, CHUNK)).squeeze(1).double()
    inside[:, 0] += ends.gather(1, chunk).squeeze(1)
    inside = inside.cumsum(dim=-1)
    return chunk * CHUNK + _search(inside, threshold), total


def _search(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """The first place beyond a threshold; never behind the last one that adds to the sum."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    place = torch.searchsorted(cumulative, threshold, right=True)
    return torch.minimum(place, last).clamp_(max=cumulative.shape[-1] - 1)


def truncate(logits: Tensor, distribution: SamplingConfig) -> Tensor:
    """Remove the tokens that may not be drawn.

    `top_k` keeps the likeliest k, then `top_p` the smallest set of the rest that reaches its probability (Holtzman et
    al., arXiv 1904.09751), then `min_p` those at least as likely as that fraction of the likeliest (arXiv 2407.01082).
    The likeliest token always stays.

    Args:
        logits: [n, vocabulary], divided by the temperature already.
        distribution: What is kept.

    Returns:
        [n, vocabulary] with minus infinity where tokens were removed.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < distribution.top_k < logits.shape[-1]:
        ordered[:, distribution.top_k :] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if distribution.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill(before >= distribution.top_p, -torch.inf)
        probabilities = ordered.softmax(dim=-1)
    if distribution.min_p > 0:
        ordered = ordered.masked_fill(probabilities < distribution.min_p * probabilities[:, :1], -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)
