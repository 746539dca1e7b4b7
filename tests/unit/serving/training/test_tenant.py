"""Adapters of a client: which layers have some, what a request that fails leaves, and how passes are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.unit.serving.training.services import served
from torch import Tensor

from leaderless.serving.training import losses
from leaderless.serving.training.adapters import AdaptedModel, AdapterShape, cut
from leaderless.serving.training.losses import TokenLoss
from leaderless.serving.training.tenant import AdamSettings, Tenant
from leaderless.serving.training.wire import Datum, PassRequest

ADAM = AdamSettings(0.01, 0.9, 0.95, 1e-8, 0.0, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdaptedModel]:
    with served(tmp_path_factory.mktemp("service")) as (_, service):
        yield service.model


def request(*sequences: list[int], is_forward_only: bool = False) -> PassRequest:
    data = [
        Datum(torch.tensor(one[:-1]), {"target_tokens": torch.tensor(one[1:]), "weights": torch.ones(len(one) - 1)})
        for one in sequences
    ]
    return PassRequest("m", 1, data, "cross_entropy", {}, is_forward_only)


def run(tenant: Tenant, wanted: PassRequest) -> float:
    """The loss of a request."""
    work = tenant.passes(wanted)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return float(end.value.metrics["loss:sum"])


def gradients(tenant: Tenant) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in tenant._parameters()]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(
    ("shape", "has", "lacks"),
    [
        (AdapterShape(2), ("q_proj", "down_proj"), ("lm_head",)),
        (AdapterShape(2, others=False), ("q_proj", "o_proj"), ("down_proj",)),
        (AdapterShape(2, attention=False), ("up_proj",), ("q_proj", "o_proj")),
    ],
)
def test_adapters_are_on_the_layers_that_were_asked_for(
    model: AdaptedModel, shape: AdapterShape, has: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    names = {name.split(".")[-2] for name in Tenant(model, shape, None).weights()}
    assert names >= {*has}
    assert not names & {*lacks}


def test_a_seed_chooses_a_and_leaves_b_at_zero(model: AdaptedModel) -> None:
    first, again, other, default = (Tenant(model, AdapterShape(2), seed).weights() for seed in (1, 1, 2, None))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.endswith("lora_A"):
            assert not torch.equal(value, other[name])
            assert not torch.equal(value, default[name])
            assert value.abs().max() <= value.shape[1] ** -0.5
        else:
            assert not value.any()


def test_all_use_the_memory_of_the_same_weights(model: AdaptedModel) -> None:
    first, second = (Tenant(model, AdapterShape(2), None) for _ in range(2))
    places = [
        {name: one.data_ptr() for name, one in tenant._engine.model.model.named_parameters() if "lora" not in name}
        for tenant in (first, second)
    ]
    assert places[0] == places[1]
    assert len(places[0]) > 10


@pytest.mark.parametrize("how", ["fails", "is stopped"])
def test_a_request_that_does_not_end_leaves_the_gradient_as_it_was(
    model: AdaptedModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tenant = Tenant(model, AdapterShape(2), 1)
    run(tenant, request([5, 6, 7]))
    before = gradients(tenant)
    monkeypatch.setattr(model, "pass_tokens", 2)
    num_passes = 0

    def failing(log_probs: Tensor, inputs: losses.Inputs, settings: losses.Settings) -> Tensor:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 3:
            raise RuntimeError("bad luck")
        return losses.cross_entropy(log_probs, inputs, settings)

    monkeypatch.setitem(losses.LOSSES, "cross_entropy", TokenLoss(("weights",), {}, failing))
    work = tenant.passes(request([8, 9, 10], [11, 12, 13], [14, 15, 16]))
    next(work)
    next(work)
    assert not same(gradients(tenant), before)
    if how == "fails":
        with pytest.raises(RuntimeError, match="bad luck"):
            next(work)
    else:
        work.close()
    assert same(gradients(tenant), before)


def test_how_passes_are_cut_changes_no_number(model: AdaptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request([5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15])
    whole, parts = (Tenant(model, AdapterShape(2), 1) for _ in range(2))
    sum_ = run(whole, wanted)
    monkeypatch.setattr(model, "pass_tokens", 3)
    assert run(parts, wanted) == pytest.approx(sum_, rel=1e-6)
    for a, b in zip(gradients(whole), gradients(parts), strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, atol=5e-6 * max(1.0, float(a.abs().max())), rtol=0)


def test_a_forward_pass_leaves_no_gradient_and_a_step_without_one_is_refused(model: AdaptedModel) -> None:
    tenant = Tenant(model, AdapterShape(2), 1)
    run(tenant, request([5, 6, 7], is_forward_only=True))
    assert same(gradients(tenant), [None] * len(gradients(tenant)))
    with pytest.raises(ValueError, match="there is no gradient"):
        tenant.step(ADAM)
    assert tenant.num_steps == 0


def test_a_gradient_that_is_not_finite_is_cleared_and_changes_nothing(model: AdaptedModel) -> None:
    tenant = Tenant(model, AdapterShape(2), 1)
    before = tenant.weights()
    run(tenant, request([5, 6, 7]))
    for parameter in tenant._parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(torch.inf)
    with pytest.raises(ValueError, match="the norm of the gradient is inf"):
        tenant.step(ADAM)
    assert all(torch.equal(value, before[name]) for name, value in tenant.weights().items())
    run(tenant, request([5, 6, 7]))
    assert tenant.step(ADAM)["grad_norm"] > 0


def test_a_longest_norm_of_zero_is_none(model: AdaptedModel) -> None:
    found = []
    for longest in (0.0, 1e-6):
        tenant = Tenant(model, AdapterShape(2), 1)
        run(tenant, request([5, 6, 7]))
        tenant.step(AdamSettings(0.01, 0.9, 0.95, 1e-3, 0.0, longest))
        found.append(max(float(one.abs().max()) for name, one in tenant.weights().items() if name.endswith("B")))
    assert found[0] > 100 * found[1]


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [([], []), ([3], [[0]]), ([2, 2, 2], [[0, 1], [2]]), ([9, 1, 3, 1], [[0], [1, 2], [3]]), ([4, 4], [[0], [1]])],
)
def test_sequences_are_cut_in_their_order(lengths: list[int], parts: list[list[int]]) -> None:
    assert [[*part] for part in cut(lengths, 4)] == parts
