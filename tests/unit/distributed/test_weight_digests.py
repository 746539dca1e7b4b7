"""Digests of weights: the same however they are divided, another one for any changed bit."""

from __future__ import annotations

import pytest
import torch

from leaderless.distributed.weights import digests
from leaderless.distributed.weights.digests import WeightPart, WeightsDigest, weights_digest


def naive(name: str, weight: torch.Tensor) -> int:
    bits = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    values = weight.contiguous().view(bits).reshape(-1).tolist()
    return digests._factor(name) * sum((2 * place + 1) * value for place, value in enumerate(values)) % (1 << 64)


def divided(name: str, weight: torch.Tensor, dim: int, sizes: list[int]) -> list[WeightPart]:
    offsets, parts = [0] * weight.ndim, []
    for local in torch.split(weight, sizes, dim=dim):
        parts.append(WeightPart(name, local, tuple(offsets), weight.shape))
        offsets[dim] += local.shape[dim]
    return parts


@pytest.mark.parametrize("small", [1 << 16, 10], ids=["together", "in blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (6, 7), (4, 6, 5), (3, 70_000)])
def test_a_digest_does_not_depend_on_how_a_weight_is_divided(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype, small: int
) -> None:
    monkeypatch.setattr(digests, "SMALL_WORDS", small)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = naive("layer", weight)
    assert weights_digest([WeightPart("layer", weight, (0,) * weight.ndim, weight.shape)]) == wanted
    for dim in range(weight.ndim):
        size = weight.shape[dim]
        for sizes in ([1, size - 1], [size - 2, 0, 2]):
            parts = divided("layer", weight, dim, sizes)
            assert sum(weights_digest([part]) for part in parts) % (1 << 64) == wanted, (dim, sizes)
            assert weights_digest(parts) == wanted
    if weight.ndim == 3:
        blocks = [
            WeightPart("layer", weight[a : a + 2, b : b + 3, c : c + 1], (a, b, c), weight.shape)
            for a in (0, 2)
            for b in (0, 3)
            for c in range(5)
        ]
        assert weights_digest(blocks) == wanted


@pytest.mark.parametrize("small", [1 << 16, 10])
def test_a_changed_bit_an_exchange_and_another_name_are_found(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(digests, "SMALL_WORDS", small)
    weights = {name: torch.randn(9, 8, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("ab")}

    def digest(named: dict[str, torch.Tensor]) -> int:
        return weights_digest(WeightPart(name, one, (0, 0), one.shape) for name, one in named.items())

    known = {digest(weights)}
    for bit in range(32):
        other = weights["a"].clone()
        other.view(torch.int32)[4, 3] ^= 1 << bit if bit < 31 else -(1 << 31)
        known.add(digest(weights | {"a": other}))
    known |= {digest({"a": weights["b"], "b": weights["a"]}), digest({"a": weights["a"], "c": weights["b"]})}
    known.add(digest({"a": weights["a"].flip(0), "b": weights["b"]}))
    assert len(known) == 36


def test_a_digest_follows_the_memory_of_the_weights() -> None:
    weight = torch.zeros(100, 100)
    digest = WeightsDigest([WeightPart("a", weight, (0, 0), weight.shape)])
    assert digest.value() == 0
    weight[3, 3] = 1.0
    assert digest.value() == naive("a", weight) != 0
