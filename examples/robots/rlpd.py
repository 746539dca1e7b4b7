"""Demonstrations for an arm that learns by itself, from its own attempts and from these: RLPD.

leaderless robot serve dummy &
python examples/robots/rlpd.py 127.0.0.1:8765 runs/rlpd-data
leaderless train recipes/robots/rlpd.yaml
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leaderless.embodied.data.lerobot import Demonstration, DemonstrationWriter
from leaderless.embodied.robots.environment import RobotEnvironment
from leaderless.embodied.simulators.protocol import VectorEnvironment

NUM_DEMONSTRATIONS, NUM_TASKS, NUM_HELD_OUT = 20, 1000, 50


def expert(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """The way from where the dummy arm is to its goal: at full speed, and slower near it."""
    place, goal = state[:, :2], state[:, 4:]
    way = (goal - place) / 0.3
    return (way / np.maximum(1.0, np.abs(way).max(axis=1, keepdims=True))).astype(np.float32)


def demonstrate(environment: VectorEnvironment, seed: int) -> tuple[bool, Demonstration]:
    """Play an episode of the expert: whether it was a success, and what it shows."""
    seen, is_over, is_success, is_terminated = environment.reset([0], [{}], [seed]), False, False, False
    states, actions, rewards = [], [], []
    while not is_over:
        states.append(seen.state[0])
        actions.append(expert(seen.state)[0])
        steps = environment.step([0], actions[-1][None, None])
        seen, is_terminated, is_success = steps.observations, bool(steps.terminated[0]), bool(steps.success[0])
        rewards.append(steps.rewards[0, 0])
        is_over = is_terminated or bool(steps.truncated[0])
    shown = Demonstration(
        {}, np.stack(states), np.stack(actions), seen.instructions[0], np.array(rewards, np.float32), is_terminated
    )
    return is_success, shown


def record(environment: VectorEnvironment, folder: Path, num: int) -> int:
    """Record successes of the expert, and write tasks; returns the number of demonstrations."""
    with DemonstrationWriter(folder / "demonstrations", robot="dummy") as recorder:
        for seed in range(10 * num):
            is_success, shown = demonstrate(environment, seed)
            if is_success:
                recorder.add(shown)
            if len(recorder) == num:
                break
    for name, first, count in (("train", 1000, NUM_TASKS), ("test", 1 << 20, NUM_HELD_OUT)):
        rows = (json.dumps({"seed": first + number}) + "\n" for number in range(count))
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return len(recorder)


if __name__ == "__main__":
    address, target = sys.argv[1:3]
    arm = RobotEnvironment(1, [address])
    print(f"{record(arm, Path(target), NUM_DEMONSTRATIONS)} demonstrations in {target}")
    arm.close()
