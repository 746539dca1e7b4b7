"""Products by blocks, and products that are not rounded to bfloat16, compared with plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from leaderless.models import scoring
from leaderless.models.scoring import (
    BLOCK,
    FEW,
    LARGE,
    add_product,
    bmm_in_float32,
    linear_for_few,
    linear_in_float32,
)


@pytest.mark.parametrize("num_rows", [0, 1, 3, FEW, FEW + 1])
@pytest.mark.parametrize("outputs", [LARGE // 256, LARGE // 256 + 1, LARGE // 256 - 1])
@pytest.mark.parametrize("has_bias", [True, False])
def test_blocks_give_the_product(num_rows: int, outputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 256, generator=generator, dtype=torch.float64) for n in (num_rows, outputs))
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64) if has_bias else None
    result = linear_for_few(rows, weight, bias)
    torch.testing.assert_close(result, linear(rows, weight, bias))
    assert result.is_contiguous()


def test_only_products_and_large_matrices_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[tuple[int, int]] = []

    def watched(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        whole.append((len(rows), len(weight)))
        return linear(rows, weight, bias)

    monkeypatch.setattr(scoring, "linear", watched)

    def multiply(num_rows: int, outputs: int, inputs: int = 256, dtype: torch.dtype = torch.float32) -> None:
        linear_for_few(torch.ones(num_rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype))

    large = LARGE // 256
    multiply(FEW, large)
    multiply(1, BLOCK, LARGE // BLOCK)
    assert whole == []
    multiply(FEW + 1, large)
    multiply(2, large - 1)
    multiply(3, large + 1)
    multiply(4, large, dtype=torch.bfloat16)
    assert whole == [(FEW + 1, large), (2, large - 1), (3, 1), (4, large)], "of the third only what is over"


@pytest.mark.parametrize("has_bias", [True, False])
def test_products_of_bfloat16_are_not_rounded_to_it(monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    """Logits of 16 to 32 would be multiples of 0.125, and their log-probabilities off by some hundredths."""
    monkeypatch.setattr(scoring, "WIDENED", 5 * 64)
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 64, generator=generator).mul(3).to(torch.bfloat16) for n in (7, 23))
    bias = torch.randn(23, generator=generator).to(torch.bfloat16) if has_bias else None
    expected = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    result = linear_in_float32(rows, weight, bias)
    assert result.dtype == torch.float32
    assert float((result - expected).abs().max()) < 1e-4
    assert float((linear(rows, weight, bias) - expected).abs().max()) > 0.1, "what rounding would cost"
    batches = bmm_in_float32(rows[None], weight.t()[None])
    torch.testing.assert_close(batches[0].double(), rows.double() @ weight.double().t(), atol=1e-4, rtol=0)


def test_blocks_pass_gradients() -> None:
    rows, weight = torch.randn(3, 256, requires_grad=True), torch.randn(LARGE // 256, 256, requires_grad=True)
    bias, factors = torch.randn(len(weight), requires_grad=True), torch.randn(3, len(weight))
    results = [
        torch.autograd.grad((function(rows, weight, bias) * factors).sum(), [rows, weight, bias])
        for function in (linear_for_few, linear)
    ]
    for gradient, expected in zip(*results, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)


def exact(left: Tensor, right: Tensor) -> Tensor:
    """What a kernel writes that multiplies half precision into float32."""
    return (left.double() @ right.double()).float()


@pytest.fixture(params=["in one kernel", "in two", "rounded"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels that a device has."""

    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert (out_dtype, request.param) == (torch.float32, "in two")
        return exact(left, right)

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert (out_dtype, request.param) == (torch.float32, "in one kernel")
        assert total is out, "in place"
        return out.add_(exact(left, right))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(scoring, "_can_write_float32", lambda _: request.param != "rounded")
    monkeypatch.setattr(scoring, "_can_add_float32", lambda _: request.param == "in one kernel")
    return str(request.param)


def test_a_sum_of_products_has_the_precision_of_its_total(kernels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        [torch.randn(n, m, generator=generator).to(torch.bfloat16) for n, m in ((24, 64), (64, 40))] for _ in range(64)
    ]
    total = torch.ones(24, 40)
    for left, right in pairs:
        add_product(total, left, right)
    expected = 1 + sum(left.double() @ right.double() for left, right in pairs)
    error = float((total - expected).norm() / expected.norm())
    assert error < (1e-6 if kernels != "rounded" else 3e-3)
    assert (error < 1e-5) == (kernels != "rounded"), "what rounding each product would cost"


def test_a_product_is_added_to_a_total_of_its_own_type() -> None:
    total, left, right = (torch.randn(n, m, dtype=torch.float64) for n, m in ((3, 5), (3, 2), (2, 5)))
    expected = total + left @ right
    add_product(total, left, right)
    torch.testing.assert_close(total, expected)


def test_the_trial_of_a_kernel_ends_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the operation is missing; a kernel that rounds the total to bfloat16 is not used."""
    monkeypatch.setattr(scoring, "_can_write_float32", lambda _: True)
    trial = scoring._can_add_float32.__wrapped__
    assert not trial("cpu")

    def answering(digits: torch.dtype) -> bool:
        def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
            return out.copy_((total + exact(left, right)).to(digits))

        monkeypatch.setattr(torch, "addmm", addmm)
        return bool(trial("cpu"))

    assert (answering(torch.float32), answering(torch.bfloat16)) == (True, False)
