"""SAC and RLPD: losses against loops and densities, ranks, checkpoints, and that they learn."""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.small_worlds import Line
from tests.unit.embodied.threads import Threads

from leaderless.algorithms.sac import Ensemble, squashed_log_densities, targets
from leaderless.algorithms.settings import SacConfig
from leaderless.config.environment import BodyConfig
from leaderless.config.models import OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import ProcessGroup
from leaderless.embodied.data.lerobot import Demonstration
from leaderless.embodied.data.replay_buffer import Transitions
from leaderless.embodied.policies.squashed import Squashed, SquashedCnn
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyEpisode, BodyTask
from leaderless.embodied.rollout.vector_envs import LocalVectorEnvs
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.embodied.stages.rollout import BodyRows
from leaderless.embodied.stages.sac import lived, no_transitions, num_due, shown
from leaderless.embodied.training.sac_learner import CRITICS, POLICY, WEIGHTS, SacLearner, observed_of
from leaderless.embodied.training.sharded_replay import Drawn, TransitionMemory
from leaderless.observability.clock import Clock

SPACES = Spaces({}, 2, Continuous((-2.0,), (4.0,)), 8)
SEEN = Spaces({"top": (8, 8)}, 0, Continuous((-2.0,), (4.0,)), 8)
CHUNK = 2
SMALL = SacConfig(batch_size=32, critic_updates=2, num_heads=3, hidden_size=16)
ALONE = ProcessGroup((0,), 0)


def decisions(seed: int, *, best: bool = False, spaces: Spaces = SPACES, num: int = 400) -> Transitions:
    """Decisions that are worth the more, the nearer both actions are to a number that is seen."""
    rng = np.random.default_rng(seed)
    place = rng.uniform(-1, 3, num).astype(np.float32)
    actions = rng.uniform(-2, 4, (num, CHUNK, 1)).astype(np.float32)
    if best:
        actions[:] = place[:, None, None]
    images = {}
    if spaces.images:
        pixels = np.broadcast_to(((place + 1) / 4 * 255)[:, None, None, None], (num, 8, 8, 3))
        images = {"top": pixels.astype(np.uint8)}
    state = np.stack([place, rng.uniform(-1, 1, num).astype(np.float32)], axis=1)[:, : spaces.state_size]
    flags = np.ones(num, bool)
    return Transitions(
        images=images,
        state=state,
        next_images=images,
        next_state=state,
        actions=actions,
        rewards=-np.abs(actions[..., 0] - place[:, None]).astype(np.float32),
        num_steps=np.full(num, 2),
        terminated=flags,
        truncated=~flags,
        intervened=np.zeros((num, CHUNK), bool),
    )


def policy_of(spaces: Spaces = SPACES) -> Squashed:
    torch.manual_seed(0)
    return (SquashedCnn if spaces.images else Squashed)(spaces, chunk=CHUNK, hidden_size=16)


def memory_of(
    folder: Path,
    transitions: Transitions,
    experts: Transitions | None = None,
    *,
    spaces: Spaces = SPACES,
    ranks: ProcessGroup = ALONE,
) -> TransitionMemory:
    """A memory of one step, in which each transition is an episode."""
    policy = policy_of(spaces)
    memory = TransitionMemory(folder, spaces, CHUNK, ranks, no_transitions(policy) if experts is None else experts)
    mine = np.flatnonzero(np.arange(len(transitions)) % ranks.size == ranks.rank)
    memory.remember(1, mine, transitions.take(mine))
    return memory


def learner_of(config: SacConfig = SMALL, spaces: Spaces = SPACES, **more: object) -> SacLearner:
    optimizer = OptimizerConfig(learning_rate=3e-3, max_grad_norm=100.0)
    return SacLearner(policy_of(spaces), config, optimizer, seed=3, **more)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    lived = decisions(0)
    memory = memory_of(tmp_path, replace(lived, rewards=np.full_like(lived.rewards, np.nan)))
    learner = learner_of()
    with pytest.raises(RuntimeError, match="the gradient of the critics has the norm nan in update 0: lower optimizer"):
        learner.update(memory.draw)


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
    density = squashed_log_densities(torch.atanh(actions)[:, None], mean, log_deviation).exp()[:, 0]
    assert float(torch.trapezoid(density, actions)) == pytest.approx(1, abs=1e-5)


def test_a_policy_gives_the_likelihood_of_what_it_draws_far_out_too() -> None:
    policy = policy_of()
    seen = observed_of({}, np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32), torch.device("cpu"))
    actions, log_probs = policy.draw(seen, 30 * torch.randn(5, 2))
    assert bool((actions.abs() <= 1).all())
    assert bool(log_probs.isfinite().all())
    torch.testing.assert_close(policy.draw(seen, None)[0], policy.draw(seen, torch.zeros(5, 2))[0])


def test_decisions_are_scored_as_they_were_made_and_lie_within_the_limits() -> None:
    policy = policy_of()
    seen = observed_of({}, np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32), torch.device("cpu"))
    noise = torch.from_numpy(np.random.default_rng(1).random((64, 2)))
    for temperature in (1.0, 3.0):
        acted = policy.act(seen, noise, temperature)
        scores = policy.score(seen, acted.choices, temperature)
        torch.testing.assert_close(scores.log_probs, acted.log_probs)
        assert float(acted.actions.detach().min()) >= -2
        assert float(acted.actions.detach().max()) <= 4
        again = policy.actions_of(policy.choices_of(acted.actions.detach()))
        torch.testing.assert_close(again, acted.actions.detach(), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="must be from"):
        policy.choices_of(torch.full((1, CHUNK, 1), 4.5))


def test_the_entropy_is_the_mean_surprise_and_has_its_gradient() -> None:
    policy = policy_of()
    seen = observed_of({}, np.zeros((1, 2), np.float32), torch.device("cpu"))
    entropy = policy.score(seen, torch.zeros(1, 2)).entropies.sum()
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((200_000, 2)).astype(np.float32))
    many = observed_of({}, np.zeros((len(noise), 2), np.float32), torch.device("cpu"))
    surprise = -policy.draw(many, noise)[1].mean()
    assert float(entropy.detach()) == pytest.approx(float(surprise.detach()), abs=0.01)
    bias = policy.layers[-1].bias
    ours, drawn = (torch.autograd.grad(one, bias)[0] for one in (entropy, surprise))
    torch.testing.assert_close(ours, drawn, atol=0.02, rtol=0)


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


@pytest.mark.parametrize("spaces", [SPACES, SEEN], ids=["state", "images"])
def test_the_number_of_ranks_changes_nothing(tmp_path: Path, spaces: Spaces) -> None:
    """Each rank has its own transitions, and they meet at each sum."""
    lived, experts = decisions(0, spaces=spaces, num=60), decisions(1, best=True, spaces=spaces, num=20)
    alone = learner_of(spaces=spaces)
    memory = memory_of(tmp_path / "alone", lived, experts, spaces=spaces)
    expected = [alone.update(memory.draw) for _ in range(3)]
    barrier, parts = threading.Barrier(3), [torch.zeros(0)] * 3
    groups = [Threads(rank, barrier, parts) for rank in range(3)]
    learners = [learner_of(spaces=spaces, sum_over_ranks=group.sum) for group in groups]
    found: list[list[dict[str, float]]] = [[], [], []]

    def run(rank: int) -> None:
        held = memory_of(tmp_path / "three", lived, experts, spaces=spaces, ranks=groups[rank])
        found[rank] = [dict(learners[rank].update(held.draw)) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        for numbers, other in zip(found[rank], expected, strict=True):
            assert numbers == pytest.approx(dict(other), abs=1e-5)
        for parameter, other in zip(learners[rank].policy.parameters(), alone.policy.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("is_entropy_valued", [False, True])
def test_an_update_is_that_of_a_loop(tmp_path: Path, is_entropy_valued: bool) -> None:
    """Over transitions one by one, with slow critics that differ from the others."""
    learner = learner_of(
        SMALL.model_copy(update={"critic_updates": 1, "first_temperature": 0.3, "is_entropy_valued": is_entropy_valued})
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in learner.slow_critics.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    kept = decisions(0)
    kept.terminated[::2], kept.num_steps[::3] = False, 1
    kept.rewards[::3, 1] = 0.0
    memory = memory_of(tmp_path, kept)
    policy, critics, slow = (copy.deepcopy(x) for x in (learner.policy, learner.critics, learner.slow_critics))
    numbers = learner.update(memory.draw)

    drawn, chance, cpu = memory.draw(32, 3, 0).transitions, learner._chance(CRITICS, 0), torch.device("cpu")
    noise = torch.from_numpy(chance.standard_normal((32, 2)).astype(np.float32))
    heads = chance.permutation(3)[:2]
    later = torch.from_numpy(learner._chance(POLICY, 0).standard_normal((32, 2)).astype(np.float32))
    critic_loss = actor_loss = entropy = 0.0
    with torch.no_grad():
        for row in range(32):
            one = drawn.take(np.array([row]))
            action, log_prob = policy.draw(observed_of({}, one.next_state, cpu), noise[row : row + 1])
            following = min(float(slow(observed_of({}, one.next_state, cpu), action)[head, 0]) for head in heads)
            following -= 0.3 * float(log_prob) * is_entropy_valued
            count = int(one.num_steps[0])
            aim = sum(0.97**step * float(one.rewards[0, step]) for step in range(count))
            aim += 0.0 if one.terminated[0] else 0.97**count * following
            taken = policy.squash(torch.from_numpy(one.actions))
            taken[:, count:] = 0.0
            values = critics(observed_of({}, one.state, cpu), taken)[:, 0]
            critic_loss += sum((float(value) - aim) ** 2 for value in values) / 3 / 32
            action, log_prob = policy.draw(observed_of({}, one.state, cpu), later[row : row + 1])
            worth = float(learner.critics(observed_of({}, one.state, cpu), action).mean())
            actor_loss += (0.3 * float(log_prob) - worth) / 32
            entropy -= float(log_prob) / 32
    expected = {"critic_loss": critic_loss, "actor_loss": actor_loss, "entropy": entropy}
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    for now, before, fast in zip(
        learner.slow_critics.parameters(), slow.parameters(), learner.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(now, 0.99 * before + 0.01 * fast)


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_step_is_one_kernel_where_all_devices_have_it(is_fused: bool) -> None:
    learner = SacLearner(policy_of(), SMALL, OptimizerConfig(), is_fused=is_fused)
    assert {one._is_fused for one in learner._optimizers.values()} == {is_fused}


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_gradients_are_clipped(tmp_path: Path, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OptimizerConfig(learning_rate=3e-3, max_grad_norm=most)
    learner, norms = SacLearner(policy_of(), SMALL, optimizer, seed=3), list[float]()
    step = learner._optimizers["critics"].step

    def note(learning_rate: float) -> None:
        grads = [one.grad for one in learner.critics.parameters() if one.grad is not None]
        norms.append(float(torch.cat([one.flatten() for one in grads]).norm()))
        step(learning_rate)

    monkeypatch.setattr(learner._optimizers["critics"], "step", note)
    learner.update(memory_of(tmp_path, decisions(0)).draw)
    assert (max(norms) <= 0.01 * (1 + 1e-5)) == (most == 0.01)


def test_draws_weights_and_noise_have_random_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, learner = memory_of(tmp_path, decisions(0)), learner_of()
    make, found = np.random.SeedSequence, list[tuple[int, ...]]()

    def note(words: list[int]) -> np.random.SeedSequence:
        found.append(tuple(make(words).generate_state(4).tolist()))
        return make(words)

    monkeypatch.setattr(np.random, "SeedSequence", note)
    for number in range(6):
        memory.draw(4, 3, number)
        for stream in (WEIGHTS, CRITICS, POLICY):
            learner._chance(stream, number)
    assert len(found) == len(set(found)) == 24


def test_episodes_become_transitions_as_in_a_loop() -> None:
    """Some end, some are cut, one has failed, and in one a person acted."""
    policy = Squashed(Line(1).spaces, chunk=2, hidden_size=8)
    engine = BodyEngine(policy, lambda: LocalVectorEnvs(Line(4), 4), torch.device("cpu"))
    tasks = [BodyTask(number, {}, seed=number) for number in range(12)]
    episodes = engine.play(tasks, seed=1, temperature=1.0, progress=lambda _: None, clock=Clock())
    engine.close()
    episodes[3] = BodyEpisode(failure="it broke", instruction=episodes[3].instruction)
    episodes[5].intervened[0][1] = True
    prompts = Batch(torch.arange(12) << 16, {"rows": ({},) * 12})
    rows = BodyRows(policy, BodyConfig(type="tests.small_worlds:Line"), 1.0, 0, keeps_taken=True)
    numbers, found = lived(rows.samples(prompts, torch.arange(12), episodes), policy)
    row = 0
    for number, episode in enumerate(episodes):
        rewards = list(episode.rewards)
        for decision, count in enumerate(episode.num_steps):
            is_last = decision == len(episode.num_steps) - 1
            assert numbers[row] == number
            assert found.num_steps[row] == count
            assert found.rewards[row].tolist() == [*rewards[:count], *[0.0] * (2 - count)]
            assert found.terminated[row] == (is_last and episode.is_terminated)
            assert found.truncated[row] == (is_last and not episode.is_terminated)
            for values, expected in (
                (found.state, episode.states[decision]),
                (found.next_state, episode.states[decision + 1]),
                (found.images["top"], episode.frames[decision].reshape(1, 8, 3)),
                (found.next_images["top"], episode.frames[decision + 1].reshape(1, 8, 3)),
                (found.actions, episode.taken[decision]),
                (found.intervened, episode.intervened[decision]),
            ):
                np.testing.assert_array_equal(values[row], expected)
            rewards = rewards[count:]
            row += 1
    assert row == len(found) == len(numbers)
    assert found.terminated.any()
    assert found.truncated.any()
    assert found.intervened.sum() == 1


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(learning_rate=3e-3),
        OptimizerConfig(learning_rate=3e-3, state_dtype="bfloat16"),
        OptimizerConfig(type="sgd", learning_rate=3e-3, momentum=0.5),
    ],
    ids=lambda one: f"{one.type}-{one.state_dtype}",
)
def test_a_learner_continues_from_a_checkpoint_bit_for_bit(tmp_path: Path, optimizer: OptimizerConfig) -> None:
    memory = memory_of(tmp_path, decisions(0))
    learner = SacLearner(policy_of(), SMALL, optimizer, seed=3)
    learner.update(memory.draw)
    kept = {name: one.clone() for name, one in learner.state().items()}
    weights = {name: one.detach().clone() for name, one in learner.policy.named_parameters()}
    expected = [learner.update(memory.draw) for _ in range(2)]
    again = SacLearner(policy_of(), SMALL, optimizer, seed=3)
    for name, one in again.state().items():
        one.copy_(kept[name])
    for name, one in again.policy.named_parameters():
        one.data.copy_(weights[name])
    again.state_loaded(1)
    assert [again.update(memory.draw) for _ in range(2)] == expected


@pytest.mark.parametrize(("spaces", "num_updates"), [(SPACES, 100), (SEEN, 150)], ids=["state", "images"])
def test_it_finds_the_best_actions(tmp_path: Path, spaces: Spaces, num_updates: int) -> None:
    memory = memory_of(tmp_path, decisions(0, spaces=spaces), spaces=spaces)
    learner = learner_of(spaces=spaces)
    numbers = [learner.update(memory.draw) for _ in range(num_updates)]
    held_out = decisions(7, best=True, spaces=spaces, num=60)
    seen = observed_of(held_out.images, held_out.state, torch.device("cpu"))
    found = learner.policy.act(seen, None).actions[..., 0].detach().numpy()
    # An error of 1.3 is that of the same action everywhere.
    assert np.abs(found - held_out.actions[..., 0]).mean() < 0.8
    assert numbers[-1]["critic_loss"] < numbers[0]["critic_loss"] / 3


@pytest.mark.parametrize(("target_entropy", "rises"), [(5.0, True), (-50.0, False)])
def test_the_temperature_rises_while_there_is_too_little_entropy(
    tmp_path: Path, target_entropy: float, rises: bool
) -> None:
    learner = learner_of(SMALL.model_copy(update={"target_entropy": target_entropy}))
    memory = memory_of(tmp_path, decisions(0))
    numbers = [learner.update(memory.draw) for _ in range(2)]
    assert (numbers[1]["temperature"] > numbers[0]["temperature"] > 0.01) == rises
    assert (numbers[1]["temperature"] < numbers[0]["temperature"] < 0.01) != rises


def test_half_of_a_batch_is_demonstrations_of_experts_and_of_people(tmp_path: Path) -> None:
    lived, experts = decisions(0, num=50), decisions(1, best=True, num=5)
    assert memory_of(tmp_path / "none", lived).draw(32, 0, 0).transitions.rewards.sum(1).max() != 0
    batch = memory_of(tmp_path / "experts", lived, experts).draw(32, 0, 0)
    assert batch.slots.tolist() == list(range(32))
    assert (batch.transitions.rewards.sum(1) == 0).tolist() == [False] * 16 + [True] * 16
    lived.intervened[7] = True
    memory = memory_of(tmp_path / "people", lived)
    assert memory.num_demonstrations == 1
    helped = memory.draw(32, 0, 0).transitions.intervened.any(1)
    assert helped[16:].all()
    assert not helped[:16].all()


def test_what_was_kept_is_numbered_alike_whoever_holds_it(tmp_path: Path) -> None:
    """Two steps, on two ranks and then on one, which takes over the files of the other; a step is made again."""
    lived = decisions(0, num=40)
    barrier, parts = threading.Barrier(2), [torch.zeros(0)] * 2
    one = TransitionMemory(tmp_path / "one", SPACES, CHUNK, ALONE, no_transitions(policy_of()))
    for step, rows in ((1, np.arange(20)), (2, np.arange(20, 40))):
        one.remember(step, rows // 2, lived.take(rows))

    def run(rank: int) -> None:
        group = Threads(rank, barrier, parts)
        held = TransitionMemory(tmp_path / "two", SPACES, CHUNK, group, no_transitions(policy_of()))
        for step, first in ((1, 0), (2, 20), (2, 20)):
            rows = np.arange(first, first + 20)
            mine = rows[(rows // 2) % 2 == rank]
            held.remember(step, mine // 2, lived.take(mine))
        held.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = TransitionMemory(tmp_path / "two", SPACES, CHUNK, ALONE, no_transitions(policy_of()))
    for held in (one, again):
        held.remember(3, np.arange(7), decisions(1, num=7))
        held.remember(4, np.arange(5), decisions(2, num=5))
        assert len(held) == 52
        assert held.num_new == 5
    for update in range(3):
        first, other = (held.draw(16, 5, update).transitions for held in (one, again))
        assert (first.actions == other.actions).all()
        assert (first.state == other.state).all()


def test_actions_that_were_not_executed_change_nothing(tmp_path: Path) -> None:
    kept = decisions(0, num=40)
    kept.num_steps[:], kept.rewards[:, 1] = 1, 0.0
    found = []
    for rest in (0.0, 3.0):
        kept.actions[:, 1] = rest
        found.append(dict(learner_of().update(memory_of(tmp_path / str(rest), kept).draw)))
    assert found[0] == found[1]


def test_demonstrations_become_transitions_of_several_steps() -> None:
    policy, actions = policy_of(), np.arange(3, dtype=np.float32)[:, None]
    states = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = shown(Demonstration({}, states, actions), policy)
    assert found.actions[..., 0].tolist() == [[0, 1], [1, 2], [2, 0]]
    assert found.rewards.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert found.num_steps.tolist() == [2, 2, 1]
    assert found.terminated.tolist() == [False, True, True]
    assert found.next_state[0].tolist() == [4, 5]
    cut = shown(Demonstration({}, states, actions, rewards=np.ones(3, np.float32), is_terminated=False), policy)
    assert cut.rewards.tolist() == [[1, 1]]
    assert not cut.terminated.any()
    with pytest.raises(ValueError, match="record it there"):
        shown(Demonstration({}, states[:, :1], actions), policy)
    with pytest.raises(ValueError, match="must be from"):
        shown(Demonstration({}, states, actions + 3), policy)


def test_every_setting_matters(tmp_path: Path) -> None:
    """Each changes what an update does, or how many there are."""
    lived = decisions(0, num=60)
    lived.terminated[:] = False
    memory = memory_of(tmp_path, lived)
    changes = {
        "batch_size": 16,
        "critic_updates": 3,
        "num_heads": 4,
        "subset_size": 1,
        "discount": 0.5,
        "target_rate": 0.5,
        "first_temperature": 1.0,
        "target_entropy": 3.0,
        "is_entropy_valued": True,
        "hidden_size": 8,
        "num_layers": 1,
    }

    def numbers(**change: object) -> list[dict[str, float]]:
        learner = learner_of(SMALL.model_copy(update=change))
        return [dict(learner.update(memory.draw)) for _ in range(2)]

    plain = numbers()
    assert numbers() == plain
    for name, value in changes.items():
        assert numbers(**{name: value}) != plain, name
    counted = {"updates_per_decision": 0.5, "first_decisions": 10}
    assert num_due(SMALL, 100) == 37
    assert num_due(SMALL.model_copy(update=counted), 100) == 45
    assert num_due(SMALL, 63) == 0
    assert {*changes, *counted} == {*SacConfig.model_fields}


def test_bodies_and_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="needs actions of real numbers"):
        Squashed(replace(SPACES, actions=Discrete(3)))
    with pytest.raises(ValueError, match="state_size=0"):
        Squashed(SEEN)
    with pytest.raises(ValueError, match="subset_size=4"):
        SacConfig(num_heads=3, subset_size=4)
    learner = learner_of()
    worst = decisions(0, num=40)
    worst.rewards[:] = math.inf
    with pytest.raises(RuntimeError, match=r"lower optimizer\.learning_rate"):
        learner.update(lambda *_: Drawn(worst.take(np.arange(32)), np.arange(32)))
