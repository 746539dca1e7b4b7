"""A careless policy moves an arm, and a person helps: what both did is recorded for a learner."""

from __future__ import annotations

import sys

import numpy as np

from leaderless.embodied.data.replay_buffer import TransitionRecorder, Transitions
from leaderless.embodied.robots.environment import RobotEnvironment


class Memory(list[Transitions]):
    """Keeps transitions, as a replay buffer does."""


def play(address: str, num_episodes: int) -> tuple[Memory, Memory]:
    """Play episodes, and return all transitions, and those in which a person acted.

    Args:
        address: Address of the arm's server.
        num_episodes: Number of episodes.
    """
    rng, online, demonstrations = np.random.default_rng(0), Memory(), Memory()
    environment, recorder = RobotEnvironment(1, [address], allows_help=True), TransitionRecorder(online, demonstrations)
    for episode in range(num_episodes):
        seen, is_over = environment.reset([0], [{}], seeds=[episode]), False
        while not is_over:
            actions = rng.uniform(-1.0, 1.0, (1, 4, 2)).astype(np.float32)  # one arm, a chunk of 4 steps, 2 axes
            steps = environment.step([0], actions)
            recorder.record(seen, actions, steps)
            seen, is_over = steps.observations, bool(steps.terminated[0] or steps.truncated[0])
    environment.close()
    return online, demonstrations


if __name__ == "__main__":
    everything, helped = play(sys.argv[1], 10)
    print(f"{sum(map(len, everything))} transitions, a person acted in {sum(map(len, helped))} of them")
