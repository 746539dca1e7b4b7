"""The contract of every policy loss, built-in or a user's `package.module:function`."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from leaderless.config.algorithm import AlgorithmConfig
from leaderless.stages.losses import LossInputs, policy_loss

LENGTHS = torch.tensor([4, 0, 1, 6, 3])
OWN = "tests.end_to_end.own_algorithm"
FUNCTIONS = {"policy_loss": f"{OWN}:own_loss"}


def sections(field: str) -> dict[str, BaseModel]:
    """One section of each type that a field accepts."""
    union = get_args(AlgorithmConfig.model_fields[field].annotation)
    kinds = [get_args(member)[0] for member in union]
    found = {}
    for kind in kinds:
        name = kind.model_fields["type"].default
        own = {"function": FUNCTIONS[field]} if name == "function" else {}
        found[name] = kind(**own)
    return found


LOSSES = sections("policy_loss")


def tokens(dtype: torch.dtype = torch.float64) -> LossInputs:
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(int(LENGTHS.sum()), generator=generator, dtype=torch.float64) - 2
    new = old + 0.5 * torch.randn(len(old), generator=generator, dtype=torch.float64)
    gain = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).repeat_interleave(LENGTHS)
    is_chosen = torch.rand(len(old), generator=generator) < 0.3
    return LossInputs(new.to(dtype).requires_grad_(), old.to(dtype), gain.to(dtype), LENGTHS, is_chosen)


def part(inputs: LossInputs, samples: list[int]) -> LossInputs:
    """Some samples in a given order."""
    rows = torch.arange(int(LENGTHS.sum())).split(LENGTHS.tolist())
    index = torch.cat([rows[sample] for sample in samples])
    new = inputs.log_probs.detach()[index].requires_grad_()
    return LossInputs(
        new, inputs.old_log_probs[index], inputs.advantages[index], LENGTHS[samples], inputs.is_chosen[index]
    )


def loss_and_gradient(name: str, inputs: LossInputs) -> Tensor:
    loss = policy_loss(LOSSES[name], inputs).loss
    assert loss.shape == inputs.log_probs.shape
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.log_probs)
    return torch.stack([loss.detach(), gradient])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_depends_on_neither_order_nor_micro_batches(name: str) -> None:
    inputs = tokens()
    whole = loss_and_gradient(name, inputs)
    assert whole.isfinite().all()
    assert whole[1].any(), "there is something to learn"
    by_sample = whole.split(LENGTHS.tolist(), dim=1)
    for samples in ([4, 3, 2, 1, 0], [3], [1], [0, 2]):
        expected = torch.cat([by_sample[sample] for sample in samples], dim=1)
        torch.testing.assert_close(loss_and_gradient(name, part(inputs, samples)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "function"])
def test_a_built_in_loss_of_half_precision_is_computed_in_single(name: str) -> None:
    loss = policy_loss(LOSSES[name], tokens(torch.bfloat16)).loss
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_better_tokens_become_likelier(name: str) -> None:
    inputs = tokens()
    gain = torch.ones_like(inputs.advantages)
    same = LossInputs(
        inputs.old_log_probs.clone().requires_grad_(), inputs.old_log_probs, gain, LENGTHS, inputs.is_chosen
    )
    _, gradient = loss_and_gradient(name, same)
    assert (gradient <= 0).all()
    assert (gradient < 0).any()
