"""Sampling of the next token, with noise that depends only on the sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig

_GOLDEN, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64 (Steele, Lea and Flood, 2014)."""
CHUNK = 256
"""Tokens of the vocabulary whose weights are summed up first."""
MASK_BITS = 64
"""Tokens of the vocabulary that one number of a mask tells apart."""
WHOLE = SamplingConfig()
"""Distribution from which logits are drawn as they are."""
MOST_FIRST = 1024
"""Most tokens that are selected without sorting all."""


def uniform_noise(seed: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Compute a number for each token, [n] float64, at least 0 and below 1.

    It depends on the seed, the sample, and the token's position in its response, [n] int64 both. However samples are
    spread over ranks, batches and decoding steps, the same token gets the same number.
    """
    # These are many steps on few numbers, for which NumPy has the least overhead.
    ids, places = (values.cpu().numpy().view(np.uint64) for values in (sample_ids, positions))
    key = _mix(np.array([seed], dtype=np.int64).view(np.uint64))
    state = _mix(_mix(ids ^ key) ^ (places + np.uint64(1)))
    noise = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(noise).to(sample_ids.device)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Compute the splitmix64 output function; products wrap around."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def sample_tokens(logits: Tensor, noise: Tensor, distribution: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of [n, vocabulary] float32 by inverting the cumulative distribution at [n] noise.

    Returns:
        [n] int64 tokens, and [n] float32 log-probabilities under the distribution they were drawn from; for temperature
        0 the likeliest token, and its log-probability at temperature 1.
    """
    if distribution.temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)
    if distribution.temperature != 1:
        logits = logits / distribution.temperature
    if distribution.is_truncated:
        logits = truncate(logits, distribution)
    peak = logits.amax(dim=-1, keepdim=True)
    # Weights of tokens relative to the likeliest, [n, chunks, CHUNK]; 0 past the end of the vocabulary.
    count, vocabulary = logits.shape
    weights = logits.new_empty(count, -(-vocabulary // CHUNK) * CHUNK)
    weights[:, vocabulary:] = 0
    torch.sub(logits, peak, out=weights[:, :vocabulary]).exp_()
    tokens, total = _invert(weights.view(count, -1, CHUNK), noise.unsqueeze(1))
    tokens = tokens.clamp_(max=vocabulary - 1)  # if logits are NaN, any token
    scores = (logits.gather(1, tokens) - peak).to(total.device) - total.log()
    return tokens.squeeze(1), scores.squeeze(1).float().to(logits.device)


def sample_recorded(logits: Tensor, noise: Tensor, distribution: SamplingConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `sample_tokens` does, and say which tokens could be drawn.

    Returns:
        What `sample_tokens` returns, and [n, numbers] int64 with a bit for each token of the vocabulary that could be
        drawn; without any if all could, or if the likeliest was taken.
    """
    if distribution.temperature == 0 or not distribution.is_truncated:
        tokens, scores = sample_tokens(logits, noise, distribution)
        return tokens, scores, tokens.new_zeros(len(tokens), num_mask_numbers(logits.shape[1]))
    logits = truncate(logits / distribution.temperature, distribution)
    is_kept = logits > -torch.inf
    is_kept &= ~is_kept.all(dim=-1, keepdim=True)
    padded = torch.nn.functional.pad(is_kept, (0, -logits.shape[1] % MASK_BITS)).view(len(logits), -1, 8)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    mask = (padded * powers).sum(dim=-1, dtype=torch.uint8).view(torch.int64)
    return *sample_tokens(logits, noise, WHOLE), mask


def num_mask_numbers(vocabulary: int) -> int:
    """Numbers of a row of the mask that `sample_recorded` returns."""
    return -(-vocabulary // MASK_BITS)


def read_support(mask: npt.NDArray[np.int64]) -> list[bytes]:
    """The tokens whose bits are set in each row of a mask, [n, numbers] int64, as bytes of int32."""
    rows, places = np.nonzero(mask)
    bits = np.unpackbits(mask[rows, places].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    which, bit = np.nonzero(bits)
    tokens = (MASK_BITS * places[which] + bit).astype("<i4")
    ends = np.bincount(rows[which], minlength=len(mask)).cumsum()
    return [part.tobytes() for part in np.split(tokens, ends[:-1])]


def write_drawn(logits: Tensor, noise: Tensor, distribution: SamplingConfig, drawn: Tensor) -> None:
    """Write what `sample_tokens` draws into [2, n] int64: tokens, and the bits of float64 log-probabilities."""
    tokens, scores = sample_tokens(logits, noise, distribution)
    torch.stack([tokens, scores.double().view(torch.int64)], out=drawn)


def write_recorded(logits: Tensor, noise: Tensor, distribution: SamplingConfig, drawn: Tensor) -> None:
    """Write what `sample_recorded` draws into [2 + numbers, n] int64, as `write_drawn` does, and its mask below."""
    tokens, scores, mask = sample_recorded(logits, noise, distribution)
    torch.stack([tokens, scores.double().view(torch.int64)], out=drawn[:2])
    drawn[2:] = mask.t()


Draw = Callable[[Tensor, Tensor, SamplingConfig, Tensor], None]
"""A function like `write_drawn`."""


@cache
def _has_float64(device: torch.device) -> bool:
    """Whether a device can search sums of float64; if not, the host does so with a few numbers for each token."""
    if device.type in {"cpu", "cuda"}:
        return True
    try:
        sums = torch.ones(1, 4, device=device).double().cumsum(dim=-1)
        torch.searchsorted(sums, sums[:, -1:].contiguous())
    except RuntimeError:  # not there for this kind of device
        return False
    return True


def _invert(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Find where cumulative weights exceed a fraction of their sum, [n, 1]: first the chunk, then the place in it.

    Sums of chunks are float32; sums of these are float64, [n, 1], and are returned too, on the device that computes
    them.
    """
    device = weights.device
    place = device if _has_float64(device) else torch.device("cpu")
    ends = torch.nn.functional.pad(weights.sum(dim=-1).to(place).double().cumsum(dim=-1), (1, 0))
    total = ends[:, -1:].contiguous()
    threshold = noise.to(place) * total
    chunk = _search(ends[:, 1:].contiguous(), threshold)
    found = weights.gather(1, chunk.to(device).unsqueeze(2).expand(-1, -1, CHUNK))
    inside = found.squeeze(1).to(place).double()
    inside[:, 0] += ends.gather(1, chunk).squeeze(1)
    inside = inside.cumsum(dim=-1)
    return (chunk * CHUNK + _search(inside, threshold)).to(device), total


def _search(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Find the first place beyond a threshold, at most the last one that adds to the sum."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    place = torch.searchsorted(cumulative, threshold, right=True)
    return torch.minimum(place, last).clamp_(max=cumulative.shape[-1] - 1)


def truncate(logits: Tensor, distribution: SamplingConfig) -> Tensor:
    """Remove tokens that may not be drawn.

    `top_k` keeps the likeliest k, then `top_p` the smallest set of the rest that reaches its probability (Holtzman et
    al., arXiv 1904.09751), then `min_p` tokens at least as likely as that fraction of the likeliest (arXiv 2407.01082).
    The likeliest token always stays. Logits, [n, vocabulary], are divided by the temperature before; logits of removed
    tokens become minus infinity.
    """
    vocabulary, top_k = logits.shape[-1], distribution.top_k
    if 0 < top_k <= min(MOST_FIRST, vocabulary - 1):
        ordered, order = _first(logits, top_k)
        # Rows that fill vector registers have the sums of all tokens, bit for bit.
        filled = torch.nn.functional.pad(ordered, (0, -top_k % 64), value=-torch.inf)
        ordered = _cut(filled, distribution)[:, :top_k]
        return torch.full_like(logits, -torch.inf).scatter_(1, order, ordered)
    if not 0 < top_k < vocabulary and distribution.top_p == 1 and logits.device.type != "cpu":
        return _likely(logits, distribution.min_p)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < vocabulary:
        ordered[:, top_k:] = -torch.inf
    return torch.empty_like(logits).scatter_(1, order, _cut(ordered, distribution))


def _likely(logits: Tensor, min_p: float) -> Tensor:
    """Remove what `min_p` does not keep, in any order: sums of all tokens may round otherwise than in descending order.

    But for this rounding, a sort would keep the same tokens at the bound.
    """
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def _cut(ordered: Tensor, distribution: SamplingConfig) -> Tensor:
    """Remove what `top_p` and `min_p` do not keep from logits [n, tokens] in descending order."""
    if distribution.top_p == 1 and distribution.min_p == 0:
        return ordered
    probabilities = ordered.softmax(dim=-1)
    if distribution.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill(before >= distribution.top_p, -torch.inf)
        probabilities = ordered.softmax(dim=-1)
    if distribution.min_p > 0:
        ordered = ordered.masked_fill(probabilities < distribution.min_p * probabilities[:, :1], -torch.inf)
    return ordered


def _first(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first logits of each row in descending order, and their places, both as a stable sort of all gives them."""
    vocabulary = logits.shape[-1]
    values, order = logits.topk(count, dim=-1)
    # Of tokens as likely as the last one, any may have been selected: take those that come first in the vocabulary.
    last = values[:, -1:]
    num_above = (values > last).sum(dim=-1, keepdim=True)
    from_end = torch.arange(vocabulary - 1, -1, -1, dtype=torch.int32, device=logits.device)
    tied = vocabulary - 1 - torch.where(logits == last, from_end, -1).topk(count, dim=-1).values.long()
    number = torch.arange(count, device=logits.device) - num_above
    tied = tied.clamp(max=vocabulary - 1).gather(1, number.clamp(min=0))  # if logits are NaN, any token
    order = torch.where(number < 0, order, tied).sort(dim=-1).values
    ordered, by = logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return ordered, order.gather(1, by)
