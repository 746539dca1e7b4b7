"""Engine that moves bodies on a rank: the policy with the newest weights, and the environments in which it acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.base.devices import cores_left
from leaderless.config import Recipe
from leaderless.config.environment import BodyConfig
from leaderless.config.models import ModelConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.embodied.data.replay_buffer import executed
from leaderless.embodied.policies.loading import open_model
from leaderless.embodied.policies.observations import images_of, padded
from leaderless.embodied.policies.protocol import BodyPolicy, Observed
from leaderless.embodied.rollout.vector_envs import Starts, VectorEnvs, open_worlds, spaces_of
from leaderless.embodied.simulators.protocol import Observations, Spaces, Steps
from leaderless.environments.protocol import Task
from leaderless.models.uploads import one_copy, placed, read_back
from leaderless.observability.clock import Clock
from leaderless.rollout.make_engine import RolloutSetup
from leaderless.rollout.native.sampling import uniform_noise


@dataclass(frozen=True)
class BodyTask:
    """An episode to play.

    Attributes:
        number: Number of the sample, from which its noise follows.
        task: Row of the dataset.
        seed: Seed of the environment; episodes with the same task and seed begin in the same state.
        is_greedy: Whether nothing is drawn.
        keeps_frames: Whether all that is seen is kept, or what was seen last.
    """

    number: int
    task: Task
    seed: int
    is_greedy: bool = False
    keeps_frames: bool = True


@dataclass
class BodyEpisode:
    """Record of an episode: T decisions, and T + 1 observations.

    Attributes:
        frames: Pixels of all cameras, uint8 [bytes], one camera after the other.
        states: State, float32 [state_size].
        instruction: Instruction.
        choices: Choices of the policy, float32 [choice_size].
        log_probs: Log-probabilities, float32 [chunk, numbers of an action].
        num_steps: Steps of each decision that were executed.
        rewards: Reward of each executed step.
        taken: Actions of each decision as they were executed, [chunk, ...], a person's where one acted; 0 for other
            steps.
        intervened: Steps of each decision in which a person acted, bool [chunk].
        is_terminated: Whether the environment ended it.
        is_success: Whether the task was done.
        failure: Reason why it cannot be judged; None if it can.
    """

    frames: list[NDArray[np.uint8]] = field(default_factory=list)
    states: list[NDArray[np.float32]] = field(default_factory=list)
    instruction: str = ""
    choices: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    taken: list[NDArray[np.generic]] = field(default_factory=list)
    intervened: list[NDArray[np.bool_]] = field(default_factory=list)
    is_terminated: bool = False
    is_success: bool = False
    failure: str | None = None

    def see(self, observations: Observations, row: int, *, keeps_frames: bool = True) -> None:
        """Keep one row of what was observed, and what was before, or not."""
        if not keeps_frames:
            self.frames.clear()
            self.states.clear()
        images = [image[row].reshape(-1) for image in observations.images.values()]
        self.frames.append(np.concatenate(images) if images else np.zeros(0, dtype=np.uint8))
        self.states.append(np.array(observations.state[row], dtype=np.float32))


class BodyEngine:
    """Plays episodes with the weights that it was given last.

    Attributes:
        policy: The policy.
        spaces: Observations and actions of its environments.
        policy_version: Number of optimizer steps that led to its weights; None while it has none.
    """

    def __init__(self, policy: BodyPolicy, open_worlds: Callable[[], VectorEnvs], device: torch.device) -> None:
        """Open environments when the first episode begins."""
        self.policy, self.device = policy, device
        self.policy_version: int | None = None
        self._open_worlds = open_worlds
        self._worlds: VectorEnvs | None = None
        self._parameters = dict(policy.named_parameters())

    @property
    def spaces(self) -> Spaces:
        """Observations and actions of its environments."""
        return self.policy.spaces

    def wake(self, reload: Callable[[], None]) -> None:
        """Do nothing: memory is taken as it is needed."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        """Replace the parameters of the policy; each of them must be sent once."""
        self.policy_version, missing = None, set(self._parameters)
        for name, tensor in weights:
            if name not in missing:
                raise RuntimeError(f"weight '{name}' was sent, which the policy does not have, or twice")
            self._parameters[name].data = tensor.to(self.device).view(self._parameters[name].shape)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"{len(missing)} of the policy's weights have not been sent, such as {min(missing)}")
        self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:
        """Keep all memory; without `keep_weights`, forget the version of the weights."""
        if not keep_weights:
            self.policy_version = None

    def close(self) -> None:
        """Close the environments."""
        if self._worlds is not None:
            self._worlds.close()
            self._worlds = None

    def play(
        self,
        tasks: Sequence[BodyTask],
        *,
        seed: int,
        temperature: float,
        progress: Callable[[float], None],
        clock: Clock,
    ) -> list[BodyEpisode]:
        """Play episodes to their ends; returns them in the order of the tasks."""
        if self._worlds is None:
            self._worlds = self._open_worlds()
        with cores_left(self._worlds.num_processes):
            return _Game(self, self._worlds, tasks, seed, temperature, clock).play(progress)

    @torch.no_grad()
    def decide(
        self, episodes: Sequence[BodyEpisode], tasks: Sequence[BodyTask], seed: int, temperature: float
    ) -> NDArray[np.generic]:
        """Decide for episodes by what each saw last; returns actions [n, chunk, dim], or [n, chunk] choices."""
        # The last observation of each, on the host.
        pixels, states = (
            torch.from_numpy(np.stack([one[-1] for one in seen]))
            for seen in ([episode.frames for episode in episodes], [episode.states for episode in episodes])
        )
        ids = [self.policy.instruction_ids(episode.instruction) for episode in episodes]
        observed = Observed(images_of(pixels, self.spaces), states, padded(ids, torch.device("cpu")))
        actions: list[NDArray[np.generic]] = [np.zeros(0)] * len(episodes)
        for is_greedy in {task.is_greedy for task in tasks}:
            rows = [row for row, task in enumerate(tasks) if task.is_greedy == is_greedy]
            some = observed if len(rows) == len(tasks) else observed.select(torch.tensor(rows))
            noise = None if is_greedy else self._noise([episodes[row] for row in rows], [tasks[r] for r in rows], seed)
            with one_copy(self.device):
                there = some.placed(self.device)
                noise = None if noise is None else placed(noise, self.device)
            acted = self.policy.act(there, noise, 1.0 if is_greedy else temperature)
            decided, choices, log_probs = read_back(acted.actions, acted.choices.float(), acted.log_probs.float())
            for place, row in enumerate(rows):
                actions[row] = decided[place].numpy()
                episodes[row].choices.append(choices[place])
                episodes[row].log_probs.append(log_probs[place])
        return np.stack(actions)

    def _noise(self, episodes: Sequence[BodyEpisode], tasks: Sequence[BodyTask], seed: int) -> Tensor:
        """Noise of each row, on the host, which follows from the seed, the sample and the number of its decision."""
        size = self.policy.noise_size
        numbers = torch.tensor([task.number for task in tasks]).repeat_interleave(size)
        decisions = torch.tensor([len(episode.choices) for episode in episodes]).repeat_interleave(size)
        places = decisions * size + torch.arange(size).repeat(len(tasks))
        return uniform_noise(seed, numbers, places).view(len(tasks), size)


class _Game:
    """Episodes that are played in the environments of a rank, half of which step while the other half waits for it."""

    def __init__(
        self,
        engine: BodyEngine,
        worlds: VectorEnvs,
        tasks: Sequence[BodyTask],
        seed: int,
        temperature: float,
        clock: Clock,
    ) -> None:
        self._engine, self._worlds, self._tasks = engine, worlds, tasks
        self._seed, self._temperature, self._clock = seed, temperature, clock
        self._episodes = [BodyEpisode() for _ in tasks]
        self._starts = Starts([(task.task, task.seed) for task in tasks], is_exact=worlds.repeats_starts)
        self._actions: dict[int, NDArray[np.generic]] = {}
        self._waiting = iter(range(len(tasks)))
        self._num_done = 0

    def play(self, progress: Callable[[float], None]) -> list[BodyEpisode]:
        """Play all of them."""
        halves = [self._seat(slots) for slots in self._worlds.halves()]
        running: list[dict[int, int]] = []
        for seats in halves:
            if seats:
                self._begin(seats)
                running.append(seats)
        while running:
            seats = running.pop(0)
            self._finish(seats)
            progress(self._num_done / max(1, len(self._tasks)))
            if seats:
                self._begin(seats)
                running.append(seats)
        return self._episodes

    def _seat(self, slots: Sequence[int]) -> dict[int, int]:
        """Give each of some environments the next episode, as long as there are some; their numbers by environment."""
        seats: dict[int, int] = {}
        free = list(slots)
        while free:
            pairs = dict(zip(free, self._waiting, strict=False))
            if not pairs:
                break
            tasks = [self._tasks[number] for number in pairs.values()]
            with self._clock.doing("environment"):
                failures, observations = self._worlds.reset(
                    list(pairs), [task.task for task in tasks], [task.seed for task in tasks]
                )
            free = []
            for row, (slot, number) in enumerate(pairs.items()):
                if slot in failures:
                    self._fail(number, failures[slot])
                    free.append(slot)
                    continue
                episode, task = self._episodes[number], self._tasks[number]
                episode.instruction = observations.instructions[row]
                episode.see(observations, row)
                self._starts.compare(task.task, task.seed, episode.frames[0], episode.states[0], episode.instruction)
                seats[slot] = number
        return seats

    def _begin(self, seats: Mapping[int, int]) -> None:
        """Decide for some environments, and let them step."""
        numbers = list(seats.values())
        tasks, episodes = [self._tasks[n] for n in numbers], [self._episodes[n] for n in numbers]
        with self._clock.doing("generate"):
            actions = self._engine.decide(episodes, tasks, self._seed, self._temperature)
        self._actions |= dict(zip(numbers, actions, strict=True))
        self._worlds.begin_step(list(seats), actions)

    def _finish(self, seats: dict[int, int]) -> None:
        """Wait for the steps of some environments; those whose episodes have ended get others."""
        with self._clock.doing("environment"):
            failures, steps = self._worlds.finish_step(list(seats))
        freed: list[int] = []
        for row, (slot, number) in enumerate(list(seats.items())):
            if slot in failures:
                self._fail(number, failures[slot])
            elif not self._take(number, steps, row):
                continue
            freed.append(slot)
            del seats[slot]
        seats.update(self._seat(freed))

    def _take(self, number: int, steps: Steps, row: int) -> bool:
        """Keep what one episode's steps have brought; returns whether it has ended."""
        episode, count = self._episodes[number], int(steps.num_steps[row])
        episode.num_steps.append(count)
        episode.rewards += steps.rewards[row, :count].tolist()
        taken, intervened = executed(self._actions.pop(number), count, steps.infos[row] if steps.infos else {})
        episode.taken.append(taken)
        episode.intervened.append(intervened)
        episode.see(steps.observations, row, keeps_frames=self._tasks[number].keeps_frames)
        episode.is_terminated = bool(steps.terminated[row])
        episode.is_success = episode.is_success or bool(steps.success[row])
        is_over = episode.is_terminated or bool(steps.truncated[row])
        self._num_done += is_over
        return is_over

    def _fail(self, number: int, reason: str) -> None:
        self._episodes[number] = BodyEpisode(failure=reason, instruction=self._episodes[number].instruction)
        self._num_done += 1


def body_shapes(role: str, recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of the policy of a role, by name, as they are sent."""
    model, body = recipe.model_of(role), recipe.body
    assert model is not None
    assert body is not None
    policy = open_model(model, f"models.{role}", spaces_of(body), is_critic=False).model
    return {name: tuple(weight.shape) or (1,) for name, weight in policy.named_parameters()}


def make_engine(setup: RolloutSetup, recipe: Recipe) -> BodyEngine:
    """Make the engine of the policy of a role; its weights come later."""
    assert recipe.body is not None
    return make_body_rollout(setup.model, f"models.{setup.role}", recipe.body, setup.device)


def make_body_rollout(model: ModelConfig, key: str, body: BodyConfig, device: torch.device) -> BodyEngine:
    """Make the engine of a policy that moves a body; its weights come later."""
    policy = open_model(model, key, spaces_of(body), is_critic=False).model
    assert isinstance(policy, BodyPolicy)
    policy = policy.eval().requires_grad_(False).to(device)
    for parameter in policy.parameters():  # not frequencies of positions, as the trainer keeps them in float32, too
        parameter.data = parameter.data.to(getattr(torch, model.compute_dtype))
    return BodyEngine(policy, partial(open_worlds, body, policy.chunk), device)
