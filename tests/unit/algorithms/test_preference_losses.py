"""The losses of preferences: closed forms, naive twins, invariances, and what TRL computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import pytest
import torch
from benchmarks.preferences_trl import REWARD_MODELS, SETTINGS, STORED, probe
from pydantic import ValidationError
from tests.preferences import loss_and_gradient, reward_loss_and_gradient
from torch import Tensor

from leaderless.algorithms.preference_loss import (
    PreferenceInputs,
    PreferenceLoss,
    PreferenceOutput,
    compute_preferences,
)
from leaderless.algorithms.preferences import PREFERENCE_LOSSES
from leaderless.algorithms.settings import AlgorithmConfig


def loss_of(kind: str, **settings: object) -> PreferenceLoss:
    return AlgorithmConfig.model_validate({"preference_loss": {"type": kind, **settings}}).preference_loss


def inputs_of(num_rows: int = 7, dtype: torch.dtype = torch.float64) -> PreferenceInputs:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 9, (2, num_rows), generator=generator)
    scores = -lengths * (0.2 + torch.rand(2, num_rows, generator=generator, dtype=torch.float64))
    reference = scores + 0.6 * torch.randn(2, num_rows, generator=generator, dtype=torch.float64)
    first, second = (one.to(dtype).requires_grad_() for one in scores)
    is_desirable = torch.rand(num_rows, generator=generator) < 0.6
    return PreferenceInputs(
        first, second, *reference.to(dtype), *lengths, is_desirable, divergence=torch.tensor(0.3, dtype=dtype)
    )


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


NAIVE: Mapping[str, tuple[dict[str, object], Callable[..., float]]] = {
    "sigmoid": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda c, r, **_: -0.9 * math.log(sigmoid(0.3 * (c - r))) - 0.1 * math.log(sigmoid(0.3 * (r - c))),
    ),
    "robust": (
        {"beta": 0.3, "label_smoothing": 0.2},
        lambda c, r, **_: (-0.8 * math.log(sigmoid(0.3 * (c - r))) + 0.2 * math.log(sigmoid(0.3 * (r - c)))) / 0.6,
    ),
    "hinge": ({"beta": 0.7}, lambda c, r, **_: max(0.0, 1 - 0.7 * (c - r))),
    "ipo": ({"beta": 0.4}, lambda c, r, tc, tr, **_: (c / tc - r / tr - 1 / 0.8) ** 2),
    "apo_zero": ({"beta": 0.3}, lambda c, r, **_: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r)),
    "simpo": (
        {"beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1},
        lambda pc, pr, tc, tr, **_: (
            -0.9 * math.log(sigmoid(2 * (pc / tc - pr / tr) - 0.7))
            - 0.1 * math.log(sigmoid(0.7 - 2 * (pc / tc - pr / tr)))
        ),
    ),
    "orpo": (
        {"beta": 0.5},
        lambda pc, pr, tc, tr, **_: -0.5 * math.log(sigmoid(log_odds(pc / tc) - log_odds(pr / tr))),
    ),
    "kto": (
        {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
        lambda c, good, z, **_: 1.2 * (1 - sigmoid(0.3 * (c - z))) if good else 0.8 * (1 - sigmoid(0.3 * (z - c))),
    ),
}


def naive(kind: str, inputs: PreferenceInputs) -> list[float]:
    """The loss of each row, computed by a loop over numbers; its arguments are named as in the formulas."""
    formula, found = NAIVE[kind][1], []
    for row in range(len(inputs.first)):
        values = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
        at = {name: float((value[row] if value.ndim else value).detach()) for name, value in values.items()}
        numbers = {
            "pc": at["first"],
            "pr": at["second"],
            "c": at["first"] - at["reference_first"],
            "r": at["second"] - at["reference_second"],
            "tc": at["first_lengths"],
            "tr": at["second_lengths"],
            "good": bool(at["is_desirable"]),
            "z": max(0.0, at["divergence"]),
        }
        found.append(formula(**numbers))
    return found


def test_every_loss_has_a_naive_twin() -> None:
    assert NAIVE.keys() == PREFERENCE_LOSSES.keys()


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_a_loss_is_its_formula(kind: str) -> None:
    inputs = inputs_of()
    found = compute_preferences(loss_of(kind, **NAIVE[kind][0]), inputs).loss
    torch.testing.assert_close(found, torch.tensor(naive(kind, inputs), dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_divergence_below_0_counts_as_none() -> None:
    below, none = (replace(inputs_of(), divergence=torch.tensor(one, dtype=torch.float64)) for one in (-0.3, 0.0))
    loss = loss_of("kto", **NAIVE["kto"][0])
    assert torch.equal(compute_preferences(loss, below).loss, compute_preferences(loss, none).loss)
    assert compute_preferences(loss, below).loss.tolist() == pytest.approx(naive("kto", below), rel=1e-12)


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_the_gradient_is_that_of_the_formula(kind: str) -> None:
    loss = loss_of(kind, **NAIVE[kind][0])

    def total(first: Tensor, second: Tensor) -> Tensor:
        return compute_preferences(loss, replace(inputs_of(), first=first, second=second)).loss

    inputs = inputs_of()
    assert torch.autograd.gradcheck(total, (inputs.first, inputs.second + 0))


@pytest.mark.parametrize("kind", ["sigmoid", "robust"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_an_identical_pair_has_the_loss_ln_2(kind: str, is_normalized: bool) -> None:
    inputs = inputs_of()
    same = replace(
        inputs,
        second=inputs.first,
        reference_second=inputs.reference_first,
        second_lengths=inputs.first_lengths,
    )
    found = compute_preferences(loss_of(kind, length_normalized=is_normalized), same)
    torch.testing.assert_close(found.loss, torch.full_like(found.loss, math.log(2)), rtol=0, atol=1e-15)
    assert torch.equal(found.first_rewards, found.second_rewards)


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_a_loss_depends_on_neither_order_nor_micro_batches(kind: str) -> None:
    loss, inputs = loss_of(kind), inputs_of()
    whole = compute_preferences(loss, inputs).loss
    for rows in ([6, 5, 4, 3, 2, 1, 0], [3], [1, 5]):
        part = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
        part = {name: value[rows] if value.ndim else value for name, value in part.items()}
        torch.testing.assert_close(
            compute_preferences(loss, PreferenceInputs(**part)).loss, whole[rows], rtol=0, atol=0
        )


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_half_precision_is_computed_in_single(kind: str) -> None:
    found = compute_preferences(loss_of(kind), inputs_of(dtype=torch.bfloat16))
    assert found.loss.dtype == found.first_rewards.dtype == torch.float32
    assert found.loss.isfinite().all()


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_extreme_log_probabilities_have_a_finite_loss_and_gradient(kind: str) -> None:
    first, second = torch.tensor([0.0, -3e4, -1e-9], requires_grad=True), torch.tensor([-3e4, 0.0, -1e-9])
    zeros, ones = torch.zeros(3), torch.ones(3, dtype=torch.int64)
    inputs = PreferenceInputs(first, second, zeros, zeros, ones, ones, torch.tensor([True, False, True]), zeros[0])
    loss = compute_preferences(loss_of(kind), inputs).loss
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite().all()
    assert first.grad is not None
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_every_setting_of_a_loss_changes_it(kind: str) -> None:
    base = loss_of(kind, **({"length_normalized": False} if kind == "sigmoid" else {}))
    inputs = inputs_of()
    for name, field in type(base).model_fields.items():
        if name in {"type", "sft_coefficient"}:  # imitation is added by the stage
            continue
        value = getattr(base, name)
        other = base.model_copy(update={name: (not value) if field.annotation is bool else value * 1.5 + 0.1})
        before, after = (compute_preferences(loss, inputs).loss for loss in (base, other))
        assert not torch.equal(before, after), name


def test_what_is_returned_must_have_a_value_for_each_row() -> None:
    class Whole(type(loss_of("hinge"))):  # type: ignore[misc]
        def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
            return PreferenceOutput(inputs.first.sum(), inputs.first, inputs.second)

    with pytest.raises(ValueError, match=r"returned loss of shape \[\]: there must be one value for each row, \[7\]"):
        compute_preferences(Whole(), inputs_of())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "sigmoid", "label_smoothing": 0.5}, "less than 0.5"),
        ({"type": "robust", "label_smoothing": 0.0}, "greater than 0"),
        ({"type": "sigmoid", "beta": 0.0}, "greater than 0"),
        ({"type": "ipo", "label_smoothing": 0.1}, "Extra inputs"),
    ],
)
def test_settings_outside_of_their_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate({"preference_loss": settings})


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))["losses"][name]
    assert stored["loss_difference"] < 1e-5
    assert stored["gradient_difference"] < 1e-5
    loss = AlgorithmConfig.model_validate({"preference_loss": SETTINGS[name]}).preference_loss
    value, gradients = loss_and_gradient(loss)
    assert value == pytest.approx(stored["trl_loss"], abs=1e-5)
    assert probe(gradients) == pytest.approx(stored["trl_gradient"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_loss_and_gradient_of_a_reward_model_are_those_of_trl(name: str) -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))["losses"][name]
    assert stored["loss_difference"] < 1e-5
    assert stored["gradient_difference"] < 1e-5
    centering, has_margins = REWARD_MODELS[name]
    value, gradients = reward_loss_and_gradient(centering, has_margins=has_margins)
    assert value == pytest.approx(stored["trl_loss"], abs=1e-5)
    assert probe(gradients) == pytest.approx(stored["trl_gradient"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["sigmoid, sft_coefficient", "kto"])
def test_loss_and_gradient_do_not_depend_on_micro_batches(name: str) -> None:
    loss = AlgorithmConfig.model_validate({"preference_loss": SETTINGS[name]}).preference_loss
    value, gradients = loss_and_gradient(loss)
    other, others = loss_and_gradient(loss, micro_batch_tokens=1)  # a pair at a time
    assert other == pytest.approx(value, rel=1e-5)
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=1e-4, atol=1e-5)
