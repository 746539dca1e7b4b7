"""SAC and RLPD: losses against loops and densities, ranks, checkpoints, and that they learn."""

from __future__ import annotations

import copy
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.robots.rlpd import learn
from tests.unit.robots.serving import serving

from leaderless.algorithms.sac import Actor, Ensemble, squashed_log_probs, targets
from leaderless.data.replay import ReplayBuffer
from leaderless.environments.bodies.protocol import Continuous, Discrete, Spaces
from leaderless.robots.dummy import dummy
from leaderless.robots.environment import RobotEnvironment
from leaderless.robots.transitions import Transitions
from leaderless.training.sac import SacConfig, SacLearner

SPACES = Spaces({}, 2, Continuous((-2.0,), (4.0,)), 8)
CHUNK = 2
SMALL = SacConfig(batch_size=32, critic_updates=2, num_heads=3, hidden_size=16, learning_rate=3e-3)


def filled(folder: Path, seed: int, *, best: float | None = None) -> ReplayBuffer:
    """A buffer of decisions that are worth the more, the nearer both actions are to the first number of the state."""
    rng = np.random.default_rng(seed)
    state = rng.uniform(-1, 3, (400, 2)).astype(np.float32)
    actions = rng.uniform(-2, 4, (400, CHUNK, 1)).astype(np.float32)
    if best is not None:
        actions[:] = state[:, None, :1]
    rewards = -np.abs(actions[..., 0] - state[:, :1]).astype(np.float32)
    buffer = ReplayBuffer(folder, SPACES, CHUNK)
    flags = np.ones(400, bool)
    buffer.append(
        Transitions({}, state, {}, state, actions, rewards, np.full(400, 2), flags, ~flags, np.zeros((400, 2), bool))
    )
    return buffer


def test_targets_are_those_of_a_loop() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0], [3.0, 5.0, 0.0]])
    num_steps, is_terminated = torch.tensor([3, 1, 2]), torch.tensor([False, False, True])
    found = targets(rewards, num_steps, is_terminated, torch.tensor([10.0, 20.0, 30.0]), 0.5)
    assert found.tolist() == [1 + 1 + 1 + 10 / 8, 1 + 20 / 2, 3 + 2.5]


def test_two_decisions_of_one_step_have_the_target_of_one_of_two() -> None:
    last = targets(torch.tensor([[2.0]]), torch.tensor([1]), torch.tensor([False]), torch.tensor([7.0]), 0.9)
    first = targets(torch.tensor([[1.0]]), torch.tensor([1]), torch.tensor([False]), last, 0.9)
    whole = targets(torch.tensor([[1.0, 2.0]]), torch.tensor([2]), torch.tensor([False]), torch.tensor([7.0]), 0.9)
    torch.testing.assert_close(first, whole)


def test_the_density_of_squashed_actions_has_the_mass_1() -> None:
    """The density is that of the action itself, so it is integrated over actions."""
    actions = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1]
    mean, log_deviation = torch.full((len(actions), 1), 0.3).double(), torch.full((len(actions), 1), -0.4).double()
    density = squashed_log_probs(torch.atanh(actions)[:, None], mean, log_deviation).exp()
    assert float(torch.trapezoid(density, actions)) == pytest.approx(1, abs=1e-5)


def test_an_actor_gives_the_likelihood_of_what_it_draws_far_out_too() -> None:
    torch.manual_seed(0)
    actor = Actor(2, 3, 8, 2)
    actions, log_probs = actor(torch.randn(5, 2), 30 * torch.randn(5, 3))
    assert bool((actions.abs() <= 1).all())
    assert bool(log_probs.isfinite().all())
    middle, _ = actor(torch.zeros(1, 2), None)
    torch.testing.assert_close(middle, actor(torch.zeros(1, 2), torch.zeros(1, 3))[0])


def test_critics_of_an_ensemble_are_as_if_computed_one_by_one() -> None:
    torch.manual_seed(0)
    critics, states, actions = Ensemble(5, 8, 2, 4), torch.randn(6, 3), torch.randn(6, 2)
    for number, found in enumerate(critics(states, actions)):
        hidden = torch.cat([states, actions], dim=1)
        for layer in range(3):
            hidden = hidden @ critics.weights[layer][number]
            if layer < 2:
                deviation = (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
                hidden = (hidden - hidden.mean(1, keepdim=True)) / deviation * critics.scales[layer][number]
            hidden = hidden + critics.biases[layer][number]
            hidden = hidden.relu() if layer < 2 else hidden
        torch.testing.assert_close(found, hidden[:, 0])


def test_the_number_of_ranks_changes_nothing(tmp_path: Path) -> None:
    """Ranks take turns here: at each sum, all have computed their part."""
    online, shown = filled(tmp_path / "online", 0), filled(tmp_path / "shown", 1, best=0.0)
    alone = SacLearner(SPACES, CHUNK, SMALL, seed=3)
    expected = [alone.update(online, shown) for _ in range(3)]
    barrier, parts = threading.Barrier(3), [torch.zeros(0)] * 3

    def summed(rank: int, part: torch.Tensor) -> torch.Tensor:
        parts[rank] = part
        barrier.wait(20)
        whole = sum(parts, torch.zeros_like(part))
        barrier.wait(20)
        return whole

    learners = [
        SacLearner(
            SPACES,
            CHUNK,
            SMALL,
            seed=3,
            rank=rank,
            num_ranks=3,
            sum_over_ranks=lambda part, rank=rank: summed(rank, part),
        )
        for rank in range(3)
    ]
    buffers = [
        (online, shown),
        *((filled(tmp_path / f"o{r}", 0), filled(tmp_path / f"s{r}", 1, best=0.0)) for r in (1, 2)),
    ]
    found: list[list[dict[str, float]]] = [[], [], []]

    def run(rank: int) -> None:
        found[rank] = [dict(learners[rank].update(*buffers[rank])) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        for numbers, other in zip(found[rank], expected, strict=True):
            assert numbers == pytest.approx(dict(other), abs=1e-5)
        for parameter, other in zip(learners[rank].actor.parameters(), alone.actor.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, atol=1e-5, rtol=0)


def test_a_learner_continues_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    online = filled(tmp_path, 0)
    learner = SacLearner(SPACES, CHUNK, SMALL, seed=1)
    learner.update(online)
    torch.save(learner.state(), tmp_path / "state.pt")
    expected = [learner.update(online) for _ in range(2)]
    again = SacLearner(SPACES, CHUNK, SMALL, seed=1)
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [again.update(online) for _ in range(2)] == expected
    state = np.zeros((3, 2), np.float32)
    assert (again.act(state, 5) == learner.act(state, 5)).all()
    assert (again.act(state, 5) != again.act(state, 6)).any()


def test_it_finds_the_best_actions_within_their_limits(tmp_path: Path) -> None:
    online = filled(tmp_path, 0)
    learner = SacLearner(SPACES, CHUNK, SMALL)
    numbers = [learner.update(online) for _ in range(150)]
    state = np.stack([np.linspace(-1, 3, 21), np.zeros(21)], axis=1).astype(np.float32)
    assert np.abs(learner.act(state, None)[..., 0] - state[:, :1]).mean() < 0.8  # 1.3 for the same action everywhere
    drawn = learner.act(np.repeat(state, 5, axis=0), 0)
    assert drawn.min() >= -2
    assert drawn.max() <= 4
    assert numbers[-1]["critic_loss"] < numbers[0]["critic_loss"] / 3


@pytest.mark.parametrize(("target_entropy", "rises"), [(5.0, True), (-50.0, False)])
def test_the_temperature_rises_while_there_is_too_little_entropy(
    tmp_path: Path, target_entropy: float, rises: bool
) -> None:
    learner = SacLearner(SPACES, CHUNK, replace(SMALL, target_entropy=target_entropy))
    numbers = [learner.update(filled(tmp_path, 0)) for _ in range(2)]
    assert (numbers[1]["temperature"] > numbers[0]["temperature"] > 0.01) == rises
    assert (numbers[1]["temperature"] < numbers[0]["temperature"] < 0.01) != rises


def test_half_of_a_batch_is_demonstrations(tmp_path: Path) -> None:
    online, shown = filled(tmp_path / "online", 0), filled(tmp_path / "shown", 1, best=0.0)
    learner = SacLearner(SPACES, CHUNK, SMALL)
    batch = learner._batch(online, shown)
    assert int((batch.rewards.sum(1) == 0).sum()) == 16
    assert len(batch.heads) == 2
    assert int((learner._batch(online, None).rewards.sum(1) == 0).sum()) == 0


def test_actions_that_were_not_executed_change_nothing(tmp_path: Path) -> None:
    learner = SacLearner(SPACES, CHUNK, SMALL)
    buffers = [ReplayBuffer(tmp_path / name, SPACES, CHUNK) for name in ("zero", "other")]
    kept = filled(tmp_path / "kept", 0).take(np.arange(40))
    kept.num_steps[:], kept.rewards[:, 1] = 1, 0.0
    for buffer, rest in zip(buffers, (0.0, 3.0), strict=True):
        changed = copy.deepcopy(kept)
        changed.actions[:, 1] = rest
        buffer.append(changed)
    first, other = (learner._batch(buffer, None) for buffer in buffers)
    assert torch.equal(first.actions, other.actions)


def test_bodies_and_settings_that_do_not_fit_are_refused() -> None:
    for spaces in (Spaces({}, 2, Discrete(3), 8), Spaces({"top": (4, 4)}, 0, SPACES.actions, 8)):
        with pytest.raises(ValueError, match="needs a state and actions of real numbers"):
            SacLearner(spaces, CHUNK, SMALL)
    with pytest.raises(ValueError, match="subset_size=4"):
        SacConfig(num_heads=3, subset_size=4)
    with pytest.raises(ValueError, match="batch_size=1"):
        SacConfig(batch_size=1)


@pytest.mark.parametrize("num_demonstrations", [0, 3])
def test_an_arm_learns_from_its_attempts_and_from_demonstrations(tmp_path: Path, num_demonstrations: int) -> None:
    with serving(dummy()) as served, closing(RobotEnvironment(1, [str(served.address)])) as arm:
        given = {"num_steps": 140, "num_demonstrations": num_demonstrations, "seed": 0, "num_held_out": 2}
        curve = learn(arm, tmp_path, **given)
        spaces = arm.spaces
    ((num_steps, rate),) = curve
    assert 140 <= num_steps < 140 + spaces.max_steps
    assert 0 <= rate <= 1
    online = ReplayBuffer(tmp_path / "online", spaces, CHUNK)
    assert online.take(np.arange(len(online))).num_steps.sum() == num_steps
    if num_demonstrations:
        shown = ReplayBuffer(tmp_path / "demonstrations", spaces, CHUNK)
        found = shown.take(np.arange(len(shown)))
        assert found.rewards.sum() == found.terminated.sum() == num_demonstrations
    assert (tmp_path / "demonstrations").exists() == (num_demonstrations > 0)
