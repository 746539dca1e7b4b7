"""An arm learns by itself, from its own attempts and a few demonstrations: RLPD, or SAC without demonstrations.

leaderless robot serve dummy &
python examples/robots/rlpd.py 127.0.0.1:8765 runs/rlpd
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leaderless.data.replay import ReplayBuffer
from leaderless.environments.bodies.protocol import VectorEnvironment
from leaderless.robots.environment import RobotEnvironment
from leaderless.robots.transitions import transitions_of
from leaderless.training.sac import SacConfig, SacLearner

CHUNK = 2
FIRST_DECISIONS = 64
"""Decisions before the first update."""
SETTINGS = SacConfig(batch_size=128, critic_updates=6, learning_rate=1e-3)
HELD_OUT_SEED = 1 << 20

Act = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def play(environment: VectorEnvironment, seed: int, act: Act, buffer: ReplayBuffer | None) -> tuple[bool, int]:
    """Play an episode: whether it was a success, and its steps.

    Args:
        environment: Environment with room for one episode.
        seed: Seed of its start.
        act: Function that decides, of states [1, state_size].
        buffer: Buffer for its transitions; None to keep none.
    """
    seen, num_steps = environment.reset([0], [{}], [seed]), 0
    while True:
        actions = act(seen.state)
        steps = environment.step([0], actions)
        if buffer is not None:
            buffer.append(transitions_of(seen, actions, steps))
        seen, num_steps = steps.observations, num_steps + int(steps.num_steps[0])
        if steps.terminated[0] or steps.truncated[0]:
            return bool(steps.success[0]), num_steps


def expert(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """The way from where the dummy arm is to its goal: at full speed, and slower near it."""
    place, goal = state[:, :2], state[:, 4:]
    way = (goal - place) / 0.3
    actions = way / np.maximum(1.0, np.abs(way).max(axis=1, keepdims=True))
    return np.repeat(actions[:, None], CHUNK, axis=1).astype(np.float32)


def learn(
    environment: VectorEnvironment,
    folder: Path,
    *,
    num_steps: int,
    num_demonstrations: int,
    seed: int,
    every: int = 1000,
    num_held_out: int = 50,
) -> list[tuple[int, float]]:
    """Learn, and return the share of held-out successes after some numbers of steps.

    Args:
        environment: Environment with room for one episode.
        folder: Folder for transitions.
        num_steps: Steps of the arm to learn from.
        num_demonstrations: Episodes of the expert; 0 for plain SAC.
        seed: Seed of everything.
        every: Steps between evaluations.
        num_held_out: Episodes of an evaluation.
    """
    learner = SacLearner(environment.spaces, CHUNK, SETTINGS, seed=seed)
    online = ReplayBuffer(folder / "online", environment.spaces, CHUNK)
    shown = ReplayBuffer(folder / "demonstrations", environment.spaces, CHUNK) if num_demonstrations else None
    for number in range(num_demonstrations):
        play(environment, seed * 10_000 + number, expert, shown)
    curve: list[tuple[int, float]] = []
    episode = num_done = 0

    def act_and_learn(state: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(online) >= FIRST_DECISIONS:
            learner.update(online, shown)
        return learner.act(state, len(online))

    while num_done < num_steps:
        num_done += play(environment, seed * 10_000 + 1000 + episode, act_and_learn, online)[1]
        episode += 1
        if num_done // every > len(curve) or num_done >= num_steps:
            curve.append((num_done, success_rate(environment, learner, num_held_out)))
    for buffer in (online, shown):
        if buffer is not None:
            buffer.close()
    return curve


def success_rate(environment: VectorEnvironment, learner: SacLearner, num_episodes: int) -> float:
    """Share of held-out episodes that are a success, without noise."""
    seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + num_episodes)
    return float(np.mean([play(environment, one, lambda state: learner.act(state, None), None)[0] for one in seeds]))


if __name__ == "__main__":
    address, folder = sys.argv[1:3]
    arm = RobotEnvironment(1, [address])
    for steps, rate in learn(arm, Path(folder), num_steps=3000, num_demonstrations=20, seed=0):
        print(f"{steps:5} steps: {rate:.0%}")
    arm.close()
