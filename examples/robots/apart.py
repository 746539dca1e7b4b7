"""An actor next to the arm and a learner elsewhere, as two programs: the arm goes on whatever happens to the learner.

leaderless robot serve dummy &
python -m examples.robots.apart act 127.0.0.1:8765 runs/apart &
python -m examples.robots.apart learn - runs/apart

Both see one folder: the actor appends transitions, and the learner replaces the policy's weights. Neither waits for the
other, and each can be started again at any time. The learner continues from the state that it wrote last.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leaderless.algorithms.settings import SacConfig
from leaderless.config.models import OptimizerConfig
from leaderless.embodied.data.replay_buffer import ReplayBuffer, transitions_of
from leaderless.embodied.policies.squashed import Squashed
from leaderless.embodied.robots.environment import RobotEnvironment
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.embodied.training.sac_learner import SacLearner, observed_of
from leaderless.embodied.training.sharded_replay import Drawn

CHUNK, EVERY, LEAST = 2, 5, 32
"""Steps of a decision, updates between two files of weights, and transitions before the first update."""
SETTINGS = SacConfig(batch_size=64, critic_updates=2, num_heads=4)
SPACES = Spaces({}, 6, Continuous((-1.0, -1.0), (1.0, 1.0)), 50)
"""What the dummy arm shows and takes; transitions of another body are refused."""
CPU = torch.device("cpu")


def act(address: str, folder: Path, num_episodes: int) -> None:
    """Play episodes with the newest weights that there are, and keep their transitions."""
    with closing(RobotEnvironment(1, [address])) as arm:
        buffer, policy = ReplayBuffer(folder / "transitions", arm.spaces, CHUNK), Squashed(arm.spaces, chunk=CHUNK)
        newest = 0.0
        for _ in range(num_episodes):
            newest = refresh(policy, folder / "policy.safetensors", newest)
            episode, is_over = len(buffer), False  # seeds that no earlier start has used
            seen = arm.reset([0], [{}], [episode])
            while not is_over:
                chance = np.random.default_rng(len(buffer))
                noise = torch.from_numpy(chance.random((1, policy.noise_size)))
                with torch.no_grad():
                    acted = policy.act(observed_of(seen.images, seen.state, CPU), noise)
                actions = acted.actions.numpy()
                steps = arm.step([0], actions)
                buffer.append(transitions_of(seen, actions, steps), episodes=episode)
                seen, is_over = steps.observations, bool(steps.terminated[0] or steps.truncated[0])
        buffer.close()


def refresh(policy: Squashed, file: Path, newest: float) -> float:
    """Load the weights of a file if it is newer than the time `newest`; returns the time of what the policy has."""
    if not file.exists() or (written := file.stat().st_mtime) <= newest:
        return newest
    for name, tensor in load_file(file).items():
        policy.get_parameter(name).data.copy_(tensor)
    return written


def learn(folder: Path, num_updates: int) -> None:
    """Learn from what the actor has kept so far, and write weights for it every few updates."""
    while not (folder / "transitions/transitions.bin").exists():
        time.sleep(0.1)
    buffer = ReplayBuffer(folder / "transitions", SPACES, CHUNK, is_reader=True)
    learner = SacLearner(Squashed(SPACES, chunk=CHUNK), SETTINGS, OptimizerConfig(learning_rate=1e-3))
    weights = dict(learner.policy.named_parameters())
    state = {f"policy.{name}": one.detach() for name, one in weights.items()} | learner.state()
    if (file := folder / "learner.safetensors").exists():
        with safe_open(file, "pt") as found:
            learner.state_loaded(int(found.metadata()["updates"]))
            for name, tensor in state.items():
                tensor.copy_(found.get_tensor(name))

    def draw(size: int, seed: int, update: int) -> Drawn:
        return Drawn(buffer.sample(size, seed=seed, step=update), np.arange(size))

    while learner.num_updates < num_updates:
        buffer.refresh()
        if len(buffer) < LEAST:
            time.sleep(0.1)
            continue
        learner.update(draw)
        if learner.num_updates % EVERY == 0:
            replace(folder / "learner.safetensors", state, {"updates": str(learner.num_updates)})
            replace(folder / "policy.safetensors", {name: one.detach() for name, one in weights.items()})


def replace(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file so that readers see all of it or the one before."""
    part = file.with_suffix(".part")
    save_file({name: one.contiguous() for name, one in tensors.items()}, part, metadata)
    part.replace(file)


if __name__ == "__main__":
    role, where, target = sys.argv[1:4]
    number = int(sys.argv[4]) if len(sys.argv) > 4 else 10_000
    if role == "act":
        act(where, Path(target), number)
    else:
        learn(Path(target), number)
