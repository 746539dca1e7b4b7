"""Rows that are taken several times: their gradients keep their digits, and come out the same each time."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import add_gradients, random_samples, tiny_model
from torch import Tensor

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.blocks import Repeats
from leaderless.models.causal_lm import load_causal_lm
from leaderless.training import fsdp
from leaderless.training.fsdp import FsdpEngine

CPU = torch.device("cpu")
SIBLINGS = 8


def gradient(dtype: torch.dtype, slope: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that are taken, and the gradient of the tensor that they are taken from."""
    values = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    taken = Repeats(rows, len(values), CPU).take(values)
    assert torch.equal(taken, values[rows])
    return taken, torch.autograd.grad(taken, values, slope.to(dtype))[0]


def test_siblings_add_up_the_gradient_of_a_common_token_in_float32() -> None:
    rows = torch.cat([torch.tensor([3, 11, 4]), torch.full((SIBLINGS,), 5), torch.tensor([0, 11])])
    slope = torch.randn(len(rows), 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    slope[3:] += 8 * (torch.arange(len(rows) - 3) % 2)[:, None].to(torch.bfloat16)  # sums with digits to lose
    (_, expected), (_, first), (_, second) = (
        gradient(dtype, slope, rows) for dtype in (torch.float64, torch.bfloat16, torch.bfloat16)
    )
    assert torch.equal(first, second)
    assert torch.equal(first, expected.to(torch.bfloat16)), "rounded once"
    one_by_one = torch.zeros(20, 6, dtype=torch.bfloat16)
    for row, part in zip(rows.tolist(), slope, strict=True):
        one_by_one[row] += part
    assert not torch.equal(one_by_one, first), "what the plain backward pass may give"
    assert not first[[1, 2, 6, 19]].any()


def test_an_update_selects_tokens_again_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where the backward pass of a plain selection adds up in any order."""

    def gradients() -> dict[str, Tensor]:
        config = ModelConfig(path=tiny_model(), compute_dtype="float32")
        model = load_causal_lm(config, "policy")
        engine = FsdpEngine(model, config, ProcessGroup((0,), 0), CPU, 64, optimizer=OptimizerConfig(), num_updates=1)
        batch = random_samples([(3, 9), (3, 1), (3, 14), (12, 2), (12, 4), (12, 21)], siblings=3)
        add_gradients(engine, batch, lambda outputs, _: outputs.log_probs.sum())
        return {name: weight.grad for name, weight in engine.named_weights() if weight.grad is not None}

    expected, numbers = gradients(), list[int]()

    def selected(_: object, select: Tensor, num_tokens: int) -> Repeats:
        numbers.append(len(select) - len(select.unique()))
        return Repeats(select, num_tokens, CPU)

    monkeypatch.setattr(fsdp._Part, "_selected", selected)
    found = gradients()
    assert max(numbers) >= 2, "siblings begin after the same token"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)
