"""Weights that are converted once for many passes."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from leaderless.training.half_precision import ConvertedWeights

HALF = torch.bfloat16


class Model(nn.Module):
    """Two layers with the same weight, of which one computes again in the backward pass, and an exact head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second.weight = self.first.weight
        self.frozen, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, values: Tensor) -> Tensor:
        values = cast("Tensor", checkpoint(self._again, values, use_reentrant=False))
        return cast("Tensor", self.head(self.frozen(self.second(values))))

    def _again(self, values: Tensor) -> Tensor:
        self.seen.append(self.first.weight.dtype)
        return cast("Tensor", self.first(values)).exp()


class Counting(TorchDispatchMode):
    """Counts operations that convert or add up."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def converted(model: Model) -> ConvertedWeights:
    return ConvertedWeights(model, HALF, [model.head], set())


def test_passes_compute_with_copies_and_gradients_add_up_in_float32(model: Model) -> None:
    weights, values = dict(model.named_parameters()), torch.randn(3, 8, 4, dtype=HALF)
    copies = converted(model)
    outputs = [model(one) for one in values]
    for output in outputs:
        assert output.dtype == torch.float32, "the head's inputs are converted to its type"
        output.sum().backward()
    assert {*model.seen} == {HALF}, "also where they are computed again"
    assert all(one is weights[name] for name, one in model.named_parameters())
    assert copies.are_there
    gradient = weights["first.weight"].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert weights["frozen.weight"].grad is None

    half = Model()
    half.load_state_dict(model.state_dict())
    half.first.to(HALF)
    half.second.weight = half.first.weight
    half.frozen.to(HALF)
    total = torch.zeros(4, 4)
    for one in values:
        half.first.zero_grad()
        hidden = half.frozen(half.second(half._again(one)))
        half.head(hidden.float()).sum().backward()
        assert half.first.weight.grad is not None
        total += half.first.weight.grad
    assert torch.equal(gradient, total)


def test_weights_are_converted_in_one_operation_until_they_are_released(model: Model) -> None:
    copies, values = converted(model), torch.randn(8, 4, dtype=HALF)
    with Counting() as counting, torch.no_grad():
        first = model(values)
        assert torch.equal(model(values), first)
        assert counting.counts["_foreach_copy_"] == 1
        assert counting.counts["copy_"] == 0
        model.first.weight += 1
        copies.release()
        assert not torch.equal(model(values), first)
        assert counting.counts["_foreach_copy_"] == 2


def test_after_a_pass_that_failed_the_weights_are_back(model: Model) -> None:
    copies, weight = converted(model), model.first.weight
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 5, dtype=HALF))
    copies.release()
    assert model.first.weight is model.second.weight is weight
    output = model(torch.randn(8, 4, dtype=HALF))
    output.register_hook(lambda _: pytest.fail("as where memory runs out"))
    with pytest.raises(BaseException, match="runs out"):
        output.sum().backward()
    copies.release()
    assert model.first.weight is model.second.weight is weight
