"""Flow policies: marginals by drawing, log-probabilities by finite differences of what was drawn, imitation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leaderless.embodied.policies.flow import SmallFlow
from leaderless.embodied.policies.flow_policy import normal_log_density, ode_step, sde_step, turned
from leaderless.embodied.policies.protocol import Observed, as_normal
from leaderless.embodied.simulators.protocol import Continuous, Spaces

ARM = Spaces({}, 2, Continuous((-1.0, -2.0), (1.0, 2.0)), 10)
MEAN, DEVIATION = 0.7, 0.5
"""Of the actions whose flow is known."""


def exact_velocity(x: Tensor, times: Tensor) -> Tensor:
    """The expected e - a at x_t = (1 - t) a + t e for normal actions: both are normal, given their sum."""
    t = times[:, None, None]
    variance = (1 - t) ** 2 * DEVIATION**2 + t**2
    surprise = (x - (1 - t) * MEAN) / variance
    return t * surprise - (MEAN + (1 - t) * DEVIATION**2 * surprise)


@pytest.mark.parametrize("drawn_steps", ["none", "one", "all"])
def test_drawn_steps_lead_to_the_same_distribution(drawn_steps: str) -> None:
    num, num_steps = 200_000, 100
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 1, 1, generator=generator)
    which = torch.randint(num_steps, (num, 1, 1), generator=generator)
    for step in range(num_steps):
        times = torch.full((num,), 1 - step / num_steps)
        velocity = exact_velocity(x, times)
        mean, deviation = sde_step(x, velocity, times, 1 / num_steps, 0.5)
        drawn = mean + deviation * torch.randn(num, 1, 1, generator=generator)
        flown = ode_step(x, velocity, times, 1 / num_steps)
        is_drawn = {"none": which < 0, "one": which == step, "all": which >= 0}[drawn_steps]
        x = torch.where(is_drawn, drawn, flown)
    assert abs(float(x.mean()) - MEAN) < 0.01
    assert abs(float(x.std()) - DEVIATION) < 0.01


def test_a_drawn_step_by_hand() -> None:
    # At t = 1/2 with steps of 1/4 and a level of 1: sigma = 1, a^ = 0, e^ = 2; so the mean is (1/4 - 1/4) * 2.
    x, velocity, times = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.tensor([0.5])
    mean, deviation = sde_step(x, velocity, times, 0.25, 1.0)
    assert float(mean) == pytest.approx(0.0)
    assert float(deviation) == pytest.approx(0.5)
    # Without noise, a quarter of e^ is left.
    assert float(ode_step(x, velocity, times, 0.25)) == pytest.approx(0.5)
    # At t = 1: sigma^2 = 1 / delta, so that the deviation is the level of the noise.
    assert float(sde_step(x, velocity, torch.ones(1), 0.25, 0.5)[1]) == pytest.approx(0.5)


def observed(num: int) -> Observed:
    state = torch.randn(num, 2, generator=torch.Generator().manual_seed(3))
    return Observed({}, state, (torch.zeros(num, 1, dtype=torch.int64), torch.zeros(num, dtype=torch.int64)))


def new_flow(method: str, *, chunk: int = 1, num_steps: int = 3, hidden_size: int = 16) -> SmallFlow:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = SmallFlow(ARM, chunk=chunk, num_steps=num_steps, method=method, hidden_size=hidden_size)
        for parameter in policy.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return policy


def drawn(policy: SmallFlow, num: int, seed: int = 0) -> Tensor:
    return torch.rand(num, policy.noise_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["sde", "noise"])
def test_log_probs_are_densities_of_what_was_drawn(method: str) -> None:
    """By the change of variables: p(what was drawn) = p(normal noise) / |d what was drawn / d noise|, differenced."""
    policy, seen = new_flow(method), observed(1)
    noise = drawn(policy, 1)
    noise[0, 0] = 0.5  # the step in the middle
    size = 2
    first = 1 + size if method == "sde" else 1  # the first noise of `sde` is given, not scored

    def points(normal: Tensor) -> Tensor:
        uniform = noise.clone()
        uniform[0, first:] = torch.special.ndtr(normal)
        choices = policy.act(seen, uniform).choices[0, 1:].double()
        return choices[size : 2 * size] if method == "sde" else choices

    normal = torch.special.ndtri(noise[0, first:])
    step = 1e-2
    columns = [
        (points(normal + step * unit) - points(normal - step * unit)) / (2 * step)
        for unit in torch.eye(len(normal), dtype=torch.float64)
    ]
    log_volume = torch.linalg.slogdet(torch.stack(columns, dim=1))[1]
    standard = torch.distributions.Normal(0.0, 1.0)
    expected = float((standard.log_prob(normal).sum() - log_volume).detach())
    assert policy.act(seen, noise).log_probs.sum().item() == pytest.approx(expected, abs=2e-3)


def test_the_log_probability_of_a_way_is_a_sum() -> None:
    policy, seen = new_flow("noise"), observed(4)
    acted = policy.act(seen, drawn(policy, 4))
    way = acted.choices[:, 1:].view(4, 4, 1, 2)
    total = normal_log_density(way[:, 0], 0.0, torch.ones_like(way[:, 0]))
    for step in range(3):
        times = torch.full((4,), 1 - step / 3)
        velocity, learnt = policy.velocity(policy.look(seen), torch.arange(4), way[:, step], times)
        low, high = torch.tensor(0.08).log(), torch.tensor(0.16).log()
        deviation = (low + (high - low) * learnt.sigmoid()).exp()
        total = total + normal_log_density(way[:, step + 1], way[:, step] - velocity / 3, deviation)
    torch.testing.assert_close(acted.log_probs, total)


def test_the_drawn_step_is_that_of_each_row() -> None:
    policy, seen = new_flow("sde"), observed(3)
    noise = drawn(policy, 3)
    noise[:, 0] = torch.tensor([0.1, 0.5, 0.99])
    acted = policy.act(seen, noise)
    assert acted.choices[:, 0].tolist() == [0, 1, 2]
    # With the last step drawn, what it leads to is the action.
    torch.testing.assert_close(acted.choices[2, 3:5], acted.choices[2, 5:7])
    assert not torch.allclose(acted.choices[0, 3:5], acted.choices[0, 5:7])


def test_without_noise_all_steps_are_flown() -> None:
    policy, seen = new_flow("sde"), observed(3)
    x = torch.zeros(3, 1, 2)
    for step in range(3):
        times = torch.full((3,), 1 - step / 3)
        x = x - policy.velocity(policy.look(seen), torch.arange(3), x, times)[0] / 3
    acted = policy.act(seen, None)
    most = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(acted.actions, (x * most).clamp(-most, most))
    torch.testing.assert_close(policy.score(seen, acted.choices).log_probs, acted.log_probs)


@pytest.mark.parametrize("method", ["sde", "noise"])
def test_demonstrations_are_learnt(method: str) -> None:
    policy = new_flow(method, chunk=2, num_steps=4, hidden_size=32)
    seen = observed(64)
    # The first number of the action follows the state, the second is one of two at random.
    side = torch.where(torch.rand(64, 2, generator=torch.Generator().manual_seed(1)) < 0.5, -1.2, 1.2)
    actions = torch.stack([torch.tanh(seen.state), side], dim=2)
    choices = policy.choices_of(actions)
    torch.testing.assert_close(policy.actions_of(choices), actions)
    assert torch.equal(policy.choices_of(actions), choices)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    first = -policy.score(seen, choices).log_probs.mean().item()
    for _ in range(400):
        loss = -policy.score(seen, choices).log_probs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.6 * first
    acted = policy.act(seen, None)
    assert (acted.actions[..., 0] - actions[..., 0]).abs().mean().item() < 0.15
    assert policy.act(seen, drawn(policy, 64)).actions[..., 1].abs().mean().item() > 0.6


def test_demonstrations_and_decisions_are_scored_next_to_each_other() -> None:
    policy, seen = new_flow("sde"), observed(6)
    acted = policy.act(seen, drawn(policy, 6))
    shown = policy.choices_of(acted.actions)
    mixed = torch.stack([acted.choices[0], shown[1], acted.choices[2], shown[3], shown[4], acted.choices[5]])
    scores = policy.score(seen, mixed)
    torch.testing.assert_close(scores.log_probs[[0, 2, 5]], policy.score(seen, acted.choices).log_probs[[0, 2, 5]])
    torch.testing.assert_close(scores.log_probs[[1, 3, 4]], policy.score(seen, shown).log_probs[[1, 3, 4]])
    assert torch.equal(scores.entropies[[1, 3, 4]], torch.zeros(3, 1, 2))


def test_turned_noise_is_even() -> None:
    noise = turned(torch.rand(1000, 3, generator=torch.Generator().manual_seed(0)), 8)
    assert noise.shape == (1000, 8, 3)
    assert float(noise.min()) >= 0.0
    assert float(noise.max()) < 1.0
    gaps = noise.sort(dim=1).values.diff(dim=1)
    assert float(gaps.max()) < 0.25  # eight numbers by chance leave larger holes
    assert abs(float(as_normal(noise).std()) - 1) < 0.02


def test_more_than_the_network_plans_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk=0 steps of 2 numbers"):
        SmallFlow(ARM, chunk=0)
