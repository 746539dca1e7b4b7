"""Which tokens can be sampled, with which noise, and with which probability."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tests.drawn import check
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.rollout.native.sampling import MOST_FIRST, _likely, sample_tokens, truncate, uniform_noise, write_drawn


def test_noise_is_uniform_and_fixed_by_seed_sample_and_position() -> None:
    ids, positions = torch.arange(2000).repeat_interleave(50), torch.arange(50).repeat(2000)
    noise = uniform_noise(3, ids, positions)
    assert noise.min() >= 0
    assert noise.max() < 1
    counts = torch.histc(noise.float(), bins=20, min=0, max=1) / len(noise)
    assert (counts - 0.05).abs().max() < 0.003
    assert torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1].abs() < 0.01, "positions are independent"
    assert torch.corrcoef(torch.stack([noise[:-50], noise[50:]]))[0, 1].abs() < 0.01, "samples are independent"
    shuffled = torch.randperm(len(ids))
    assert torch.equal(uniform_noise(3, ids[shuffled], positions[shuffled]), noise[shuffled])
    assert not torch.equal(uniform_noise(4, ids, positions), noise)
    assert len(noise.unique()) == len(noise)


def test_noise_does_not_change_between_releases() -> None:
    noise = uniform_noise(0, torch.tensor([0, 1 << 16, 5]), torch.tensor([0, 0, 7]))
    expected = [splitmix_noise(0, sample, position) for sample, position in ((0, 0), (1 << 16, 0), (5, 7))]
    assert noise.tolist() == expected


def splitmix_noise(seed: int, sample: int, position: int) -> float:
    """The same in Python's own integers."""
    mask = (1 << 64) - 1

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    return (mix(mix(sample ^ mix(seed)) ^ (position + 1)) >> 11) * 2.0**-53


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]]).repeat(40_000, 1)
    noise = uniform_noise(0, torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64))
    for temperature in (0.5, 1.0, 2.0):
        tokens, log_probs = sample_tokens(logits, noise, SamplingConfig(temperature=temperature))
        expected = (logits[0] / temperature).log_softmax(-1)
        frequency = torch.bincount(tokens, minlength=4) / len(tokens)
        assert (frequency - expected.exp()).abs().max() < 0.01
        torch.testing.assert_close(log_probs, expected[tokens])


def test_temperature_zero_takes_the_likeliest_token() -> None:
    tokens, log_probs = sample_tokens(
        torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.99], dtype=torch.float64), SamplingConfig(temperature=0)
    )
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_probs, torch.tensor([0.0, 3.0, 1.0]).log_softmax(-1)[1:2])


def test_tokens_are_those_of_a_loop_in_float64() -> None:
    num_draws, num_near = check(write_drawn, torch.device("cpu"))
    assert num_near < num_draws / 4, "most tokens are the same whatever rounding does"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 2]),
        ({"top_p": 0.8}, [0, 2]),
        ({"top_p": 0.85}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.5}, [0, 2]),
    ],
)
def test_truncation_keeps_what_it_says(settings: dict[str, float], kept: list[int]) -> None:
    probabilities = torch.tensor([[0.5, 0.15, 0.3, 0.05]])
    result = truncate(probabilities.log(), SamplingConfig(**settings))
    assert result[0].isfinite().nonzero().squeeze(1).tolist() == kept
    torch.testing.assert_close(result[0, kept], probabilities.log()[0, kept])


def sorted_cut(logits: Tensor, settings: SamplingConfig) -> Tensor:
    """What `truncate` leaves, by a stable sort of all tokens."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if 0 < settings.top_k < logits.shape[-1]:
        ordered[:, settings.top_k :] = -torch.inf
    probabilities = ordered.softmax(dim=-1)
    if settings.top_p < 1:
        ordered = ordered.masked_fill(probabilities.cumsum(dim=-1) - probabilities >= settings.top_p, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    ordered = ordered.masked_fill(probabilities < settings.min_p * probabilities[:, :1], -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


@given(
    some.lists(some.sampled_from([-torch.inf, -3.0, -1.5, -0.5, -0.0, 0.0, 0.25, 2.0]), min_size=1, max_size=140),
    some.floats(0.0, 2.0),
    some.integers(1, 150),
    some.sampled_from([1.0, 0.9, 0.5, 0.1]),
    some.sampled_from([0.0, 0.05, 0.6]),
)
def test_the_likeliest_tokens_are_those_of_a_stable_sort_bit_for_bit(
    values: list[float], noise: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(len(values))
    logits = torch.tensor([values, values[::-1]]) + noise * torch.randn(2, len(values), generator=generator)
    logits[:, 0] = logits[:, 0].clamp(min=-4)
    config = SamplingConfig(top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(truncate(logits, config), sorted_cut(logits, config))


def test_likely_tokens_need_no_sort() -> None:
    """Also with ties at the bound."""
    logits = (4 * torch.randn(20, 3000, generator=torch.Generator().manual_seed(1))).round() / 2
    for least in (0.001, 0.05, 0.7, 1.0):
        assert torch.equal(_likely(logits, least), sorted_cut(logits, SamplingConfig(min_p=least)))
    ties = torch.zeros(1, 64)
    ties[:, 5:] = torch.tensor(0.5).log()
    assert torch.equal(_likely(ties, 0.5), sorted_cut(ties, SamplingConfig(min_p=0.5)))


def test_few_tokens_of_many_are_those_of_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ties at the end of what is selected, and sums of a whole vocabulary."""
    logits = (4 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))).round() / 2
    many = [SamplingConfig(top_k=k, top_p=p, min_p=0.01) for k in (1, 63, 64, 65, 1024) for p in (1.0, 0.8)]
    for config in many:
        assert torch.equal(truncate(logits, config), sorted_cut(logits, config))
    sort, sizes = Tensor.sort, list[int]()
    monkeypatch.setattr(
        Tensor, "sort", lambda one, *args, **named: (sizes.append(len(one[0])), sort(one, *args, **named))[1]
    )
    for config in many:
        truncate(logits, config)
    assert max(sizes) == 1024, "not all tokens are sorted"
    monkeypatch.undo()
    config = SamplingConfig(top_k=MOST_FIRST + 1)
    assert torch.equal(truncate(logits, config), sorted_cut(logits, config)), "too many to be selected"


def test_removed_tokens_are_never_drawn_and_log_probs_are_of_what_is_left() -> None:
    logits = torch.randn(5000, 30, generator=torch.Generator().manual_seed(0))
    noise = torch.linspace(0, 1 - 2**-53, 5000, dtype=torch.float64)
    config = SamplingConfig(top_k=5, temperature=0.7)
    tokens, log_probs = sample_tokens(logits, noise, config)
    allowed = truncate(logits / 0.7, config)
    assert allowed.gather(1, tokens[:, None]).isfinite().all()
    torch.testing.assert_close(log_probs, allowed.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


@pytest.mark.parametrize("vocabulary", [3, 256, 1000])
def test_tokens_are_where_the_cumulative_distribution_passes_the_noise(vocabulary: int) -> None:
    logits = 3 * torch.randn(2000, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[::2, -(vocabulary // 3) :] = -torch.inf
    noise = uniform_noise(1, torch.arange(2000), torch.zeros(2000, dtype=torch.int64))
    noise[:2] = 1 - 2**-53
    tokens, log_probs = sample_tokens(logits, noise, SamplingConfig())
    probabilities = logits.double().softmax(dim=-1)
    after = probabilities.cumsum(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    chosen = probabilities.gather(1, tokens[:, None]).squeeze(1)
    assert (chosen > 0).all()
    assert (noise < after + 1e-6).all()
    assert (noise > after - chosen - 1e-6).all()
    torch.testing.assert_close(log_probs, chosen.log().float())


@pytest.mark.parametrize("way", [{}, {"top_k": 20}, {"top_p": 0.9}])
def test_logits_that_are_no_numbers_still_give_a_token(way: dict[str, float]) -> None:
    tokens, log_probs = sample_tokens(torch.full((2, 300), torch.nan), torch.rand(2).double(), SamplingConfig(**way))
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert log_probs.isnan().all()
