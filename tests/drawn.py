"""Drawing of tokens for tests: rows of all kinds, and a loop in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.rollout.native.sampling import Draw, sample_tokens

Rows = Callable[[torch.Generator], Tensor]
LAST = 1 - 2.0**-53
"""Largest noise."""
NEAR = 1e-6
"""Distance of noise from the end of a token, within which rounding may choose another one."""


def _spread(count: int, vocabulary: int, scale: float) -> Rows:
    return lambda generator: scale * torch.randn(count, vocabulary, generator=generator)


def _some_removed(generator: torch.Generator) -> Tensor:
    """Rows with few tokens that can be drawn, in some chunks none at all."""
    logits = torch.randn(24, 1500, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.98] = -torch.inf
    logits[:, 256:768] = -torch.inf
    logits[:, 900] = 0.5
    return logits


def _far_apart(generator: torch.Generator) -> Tensor:
    """Rows with tokens whose weights are 0 in float32, at the beginning, at the end and next to the likeliest."""
    logits = torch.full((14, 1024), -120.0)
    logits[:, 300:700] = torch.randn(14, 400, generator=generator)
    logits[:, 520] = -110.0
    return logits


CASES: dict[str, Rows] = {
    "flat, whole chunks": _spread(24, 1024, 0.1),
    "peaked": _spread(24, 2000, 6.0),
    "one chunk and a part": _spread(16, 257, 1.0),
    "tiny": _spread(24, 7, 2.0),
    "one token": _spread(4, 1, 1.0),
    "many chunks": _spread(6, 40_003, 2.0),
    "some removed": _some_removed,
    "far apart": _far_apart,
    "large numbers": lambda generator: 1e4 + 3 * torch.randn(14, 3000, generator=generator),
    "ties": lambda generator: torch.randint(0, 2, (14, 700), generator=generator).float(),
}


def noise_of(count: int, generator: torch.Generator) -> Tensor:
    """Noise for rows, the least and the largest included."""
    noise = torch.rand(count, dtype=torch.float64, generator=generator)
    noise[::7], noise[1::7] = 0.0, LAST
    return noise


def loop(logits: list[float], noise: float) -> tuple[int, list[float], list[float]]:
    """The token of a row, its log-probabilities, and where tokens end in the cumulative distribution, in float64."""
    peak = max(logits)
    # What is 0 in float32 cannot be drawn.
    weights = [0.0 if one - peak < -103.9 else math.exp(one - peak) for one in logits]
    total = math.fsum(weights)
    ends, chosen = list(accumulate(weight / total for weight in weights)), -1
    for token, weight in enumerate(weights):
        if weight > 0 and (chosen < 0 or ends[token - 1] <= noise):
            chosen = token
    return chosen, [one - peak - math.log(total) for one in logits], [0.0, *ends]


def check(draw: Draw, device: torch.device, *, temperatures: tuple[float, ...] = (1.0, 0.5)) -> tuple[int, int]:
    """Compare tokens and log-probabilities with the loop and with `sample_tokens`.

    Returns:
        Number of draws, and of those that are too near to the end of a token for rounding to have no say.
    """
    num_draws = num_near = 0
    for number, (name, rows) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(number)
        logits = rows(generator)
        noise = noise_of(len(logits), generator)
        for temperature in temperatures:
            tokens, scores = drawn_by(draw, logits, noise, temperature, device)
            expected, _ = sample_tokens(logits, noise, SamplingConfig(temperature=temperature))
            for row, token in enumerate(tokens):
                at, place = float(noise[row]), (name, temperature, row)
                own, log_probs, ends = loop((logits[row] / temperature).tolist(), at)
                assert scores[row] == pytest.approx(log_probs[token], abs=3e-6, rel=3e-6), place
                is_near = at > 0 and min(abs(end - at) for end in ends[1:]) < NEAR
                num_draws, num_near = num_draws + 1, num_near + is_near
                if is_near:
                    assert ends[token] - NEAR <= at <= ends[token + 1] + NEAR, place
                    assert log_probs[token] > -1000, place
                else:
                    assert token == expected[row] == own, place
        tokens, scores = drawn_by(draw, logits, noise, 0.0, device)
        greedy, log_probs = sample_tokens(logits, noise, SamplingConfig(temperature=0))
        assert tokens == greedy.tolist(), name
        rounding = float(logits.max()) * 2.0**-22  # of `logsumexp`, the sum of the peak and a logarithm
        assert scores == pytest.approx(log_probs.tolist(), abs=3e-6 + rounding, rel=3e-6), name
    check_numbers_that_are_none(draw, device)
    return num_draws, num_near


def drawn_by(
    draw: Draw, logits: Tensor, noise: Tensor, temperature: float, device: torch.device
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities."""
    drawn = torch.full((3, len(logits)), -1, device=device)
    draw(logits.to(device), noise.to(device), SamplingConfig(temperature=temperature), drawn[:2])
    assert (drawn[2] == -1).all()
    scores = drawn[1].cpu().view(torch.float64)
    assert torch.equal(scores, scores.float().double())
    return drawn[0].tolist(), scores.tolist()


def check_numbers_that_are_none(draw: Draw, device: torch.device) -> None:
    """Without a distribution the token is any, but there is one, and its log-probability is no number."""
    logits = torch.zeros(5, 600)
    logits[0, 300], logits[1], logits[2], logits[3, 599] = torch.nan, torch.nan, -torch.inf, torch.inf
    noise = torch.full((5,), 0.5, dtype=torch.float64)
    for temperature in (1.0, 0.0):
        drawn = torch.full((2, 5), -1, device=device)
        draw(logits.to(device), noise.to(device), SamplingConfig(temperature=temperature), drawn)
        assert ((drawn[0] >= 0) & (drawn[0] < 600)).all()
        scores = drawn[1].cpu().view(torch.float64).tolist()
        assert [math.isnan(one) for one in scores] == [True] * 4 + [False]


if __name__ == "__main__":  # Triton has to know before it is imported that it is to interpret
    from leaderless.rollout.native.sampling_kernels import draw_with_kernels

    print(*check(draw_with_kernels, torch.device("cpu")))
