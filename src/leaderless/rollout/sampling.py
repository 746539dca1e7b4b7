"""The next token: which ones may be drawn, and which one is, with noise that depends on the sample alone."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
"""Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers."""


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
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=sample_ids.device))
    state = _mix(_mix(sample_ids ^ key) ^ (positions + 1))
    return _shift(state, 11).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """The splitmix64 output function; products wrap around."""
    state = state + _GOLDEN
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed integers."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


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
    logits = logits / distribution.temperature
    if distribution.is_truncated:
        logits = truncate(logits, distribution)
    cumulative = logits.softmax(dim=-1).double().cumsum(dim=-1)
    threshold = noise.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    last_allowed = (logits.shape[-1] - 1) - logits.flip(-1).isfinite().int().argmax(dim=-1)
    tokens = torch.minimum(tokens, last_allowed)
    return tokens, _log_prob(logits, tokens)


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
