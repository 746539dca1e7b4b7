"""The contract of every policy loss, built-in or a user's `package.module:function`."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from tests.end_to_end.own_algorithm import OwnLoss
from torch import Tensor

from leaderless.algorithms import ChoiceInputs, LossInputs, LossOutput, PolicyLoss
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.policy_loss import compute

LENGTHS = torch.tensor([4, 0, 1, 6, 3])
LOSSES: dict[str, PolicyLoss] = {
    **{name: kind.model_validate({}) for name, kind in POLICY_LOSSES.items()},
    "custom": OwnLoss(type="tests.end_to_end.own_algorithm:OwnLoss", strength=2.0),
}


def tokens(dtype: torch.dtype = torch.float64) -> LossInputs:
    generator = torch.Generator().manual_seed(1)
    old = torch.randn(int(LENGTHS.sum()), generator=generator, dtype=torch.float64) - 2
    new = old + 0.5 * torch.randn(len(old), generator=generator, dtype=torch.float64)
    gain = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).repeat_interleave(LENGTHS)
    is_chosen = torch.rand(len(old), generator=generator) < 0.3
    columns = {
        "rewards": torch.ones(len(old)),
        "truncated": is_chosen,
        "rollout_log_probs": old.to(dtype),
        "doubt": 0.1 * is_chosen,
    }
    new = new.to(dtype).requires_grad_()
    return LossInputs(new, old.to(dtype), gain.to(dtype), LENGTHS, torch.ones_like(is_chosen), is_chosen, columns, 1)


def part(inputs: LossInputs, samples: list[int]) -> LossInputs:
    """Some samples in a given order."""
    rows = torch.arange(int(LENGTHS.sum())).split(LENGTHS.tolist())
    index = torch.cat([rows[sample] for sample in samples])
    return LossInputs(
        inputs.log_probs.detach()[index].requires_grad_(),
        inputs.old_log_probs[index],
        inputs.advantages[index],
        LENGTHS[samples],
        inputs.is_counted[index],
        inputs.is_chosen[index],
        {name: values[index] for name, values in inputs.columns.items()},
        inputs.step,
    )


def loss_and_gradient(name: str, inputs: LossInputs) -> Tensor:
    loss = compute(LOSSES[name], inputs).loss
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


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_built_in_loss_of_half_precision_is_computed_in_single(name: str) -> None:
    loss = compute(LOSSES[name], tokens(torch.bfloat16)).loss
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_better_tokens_become_likelier(name: str) -> None:
    inputs = tokens()
    gain = torch.ones_like(inputs.advantages)
    on_policy = inputs.old_log_probs.clone().requires_grad_()
    same = replace(inputs, log_probs=on_policy, advantages=gain)
    _, gradient = loss_and_gradient(name, same)
    assert (gradient <= 0).all()
    assert (gradient < 0).any()


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].chooses_tokens])
def test_a_choice_depends_on_neither_order_nor_ranks(name: str) -> None:
    loss = LOSSES[name].model_copy(update={"fraction": 0.3, "lowest": 0.01})
    inputs = tokens()
    noise = torch.rand(len(inputs.advantages), generator=torch.Generator().manual_seed(2))
    columns = (inputs.log_probs.detach(), inputs.advantages, noise)
    read = {name: inputs.columns[name] for name in loss.reads}
    chosen = loss.choose(ChoiceInputs(*columns, lambda values: values, read))
    assert chosen.dtype == torch.bool
    assert 0 < int(chosen.sum()) < len(chosen)
    order = torch.randperm(len(noise), generator=torch.Generator().manual_seed(3))
    read = {name: values[order] for name, values in read.items()}
    other = loss.choose(ChoiceInputs(*(column[order] for column in columns), lambda values: values, read))
    assert torch.equal(other, chosen[order])


class Wrong(PolicyLoss):
    """A loss that does not keep to what it declares."""

    returned: str

    metrics: ClassVar[dict[str, str]] = {"spread": "how far ratios are apart"}

    def compute(self, inputs: LossInputs) -> LossOutput:
        right = LossOutput.without_clipping(-inputs.log_probs, {"spread": inputs.advantages})
        return {
            "a mean": replace(right, loss=right.loss.mean()),
            "per response": replace(right, is_clipped=inputs.lengths > 1),
            "no metric": replace(right, metrics={}),
            "a short metric": replace(right, metrics={"spread": inputs.advantages[1:]}),
        }[self.returned]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("a mean", r"type=m:Wrong returned a loss of shape \[\]: .* each response token, \[14\]"),
        ("per response", r"returned is_clipped of shape \[5\]"),
        ("no metric", r"returned the metrics \[\], but declares \['spread'\]"),
        ("a short metric", r"the metric 'spread' of shape \[13\]"),
    ],
)
def test_a_class_that_returns_something_else_than_it_declares_is_named(returned: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute(Wrong(type="m:Wrong", returned=returned), tokens())
