"""States with mean 0 and deviation 1: the numbers themselves; that ranks change nothing is in tests/end_to_end."""

from __future__ import annotations

import pytest
import torch

from leaderless.config.environment import PolicyConfig
from leaderless.embodied.policies.loading import make_model
from leaderless.embodied.policies.observations import StateNormalizer, joined, moments
from leaderless.embodied.policies.protocol import BodyPolicy, Observed
from leaderless.embodied.simulators.protocol import Continuous, Spaces

STATES = torch.tensor([1.34, 0.75, -20.0]) + torch.tensor([0.05, 1.0, 0.0]) * torch.randn(
    500, 3, generator=torch.Generator().manual_seed(0)
)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_moments_do_not_depend_on_how_states_arrive(parts: int) -> None:
    found = (torch.zeros(3), torch.ones(3), torch.zeros(1))
    for part in STATES.chunk(parts):
        ranks = part[::2], part[1::2]
        added = sum((moments(one, found[0]) for one in ranks), torch.zeros(7, dtype=torch.float64))
        found = joined(*found, added)
    torch.testing.assert_close(found[0], STATES.double().mean(0))
    torch.testing.assert_close(found[1], STATES.double().var(0, unbiased=False))
    assert float(found[2]) == 500


def test_a_number_that_never_changes_becomes_zero_and_a_rare_one_is_limited() -> None:
    normalizer = StateNormalizer(3)
    torch.testing.assert_close(normalizer(torch.tensor([[1.0, -2.0, 99.0]])), torch.tensor([[1.0, -2.0, 10.0]]))
    found = joined(normalizer.mean, normalizer.variance, normalizer.count, moments(STATES, normalizer.mean))
    for weight, value in zip(normalizer.parameters(), found, strict=True):
        weight.copy_(value.float())
    seen = normalizer(STATES)
    torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen.std(0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-2, rtol=0)
    assert not any(weight.requires_grad for weight in normalizer.parameters())


@pytest.mark.parametrize("kind", ["mlp", "cnn", "film", "flow", "flow without images"])
def test_a_policy_that_normalizes_sees_the_same_in_other_units(kind: str) -> None:
    images = {} if kind in {"mlp", "flow without images"} else {"top": (16, 16)}
    spaces = Spaces(images, 3, Continuous((-1.0,), (1.0,)), 10)
    config = PolicyConfig(type=kind.split(maxsplit=1)[0], options={"normalize": True})
    policy = make_model(config, "models.policy", spaces, is_critic=False)
    assert isinstance(policy, BodyPolicy)
    (normalizer,) = (one for one in policy.modules() if isinstance(one, StateNormalizer))
    pixels = {camera: torch.zeros(4, *size, 3, dtype=torch.uint8) for camera, size in images.items()}
    words = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    noise = torch.rand(4, policy.noise_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    choices = policy.act(Observed(pixels, STATES[:4], words), noise).choices
    found = []
    for scale in (1.0, 1000.0):
        normalizer.mean.copy_(STATES.mean(0) * scale)
        normalizer.variance.copy_((STATES.var(0) + 1e-3) * scale**2)
        found.append(policy.score(Observed(pixels, STATES[:4] * scale, words), choices).log_probs)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    normalizer.mean.zero_()
    assert not torch.allclose(policy.score(Observed(pixels, STATES[:4] * 1000, words), choices).log_probs, found[0])
