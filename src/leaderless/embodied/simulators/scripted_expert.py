"""Episodes that the scripted expert of an environment plays, step by step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from leaderless.embodied.data.lerobot import Demonstration
from leaderless.embodied.simulators.protocol import Observations, VectorEnvironment

AT_ONCE = 64
"""Episodes that are played at the same time."""


@dataclass
class _Trace:
    images: dict[str, list[NDArray[np.uint8]]] = field(default_factory=dict)
    states: list[NDArray[np.float32]] = field(default_factory=list)
    actions: list[NDArray[np.generic]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_terminated: bool = False
    instruction: str = ""

    def see(self, observations: Observations, row: int) -> None:
        for camera, images in observations.images.items():
            self.images.setdefault(camera, []).append(images[row].copy())
        self.states.append(observations.state[row].copy())
        self.instruction = observations.instructions[row]

    def whole(self) -> Demonstration:
        images = {camera: np.stack(frames) for camera, frames in self.images.items()}
        rewards = np.array(self.rewards, np.float32)
        states, actions = np.stack(self.states), np.stack(self.actions)
        return Demonstration(images, states, actions, self.instruction, rewards, self.is_terminated)


def played(environment: VectorEnvironment, seed: int) -> Iterator[tuple[bool, Demonstration]]:
    """Endless episodes of an expert in the order of their seeds, each with whether it did its task."""
    for first in count(seed, AT_ONCE):
        yield from _together(environment, range(first, first + AT_ONCE))


def _together(environment: VectorEnvironment, seeds: Sequence[int]) -> list[tuple[bool, Demonstration]]:
    running, traces = list(range(len(seeds))), [_Trace() for _ in seeds]
    is_done = [False] * len(seeds)
    seen = environment.reset(running, [{"seed": seed} for seed in seeds], seeds)
    while running:
        actions = environment.expert(running)
        for row, number in enumerate(running):
            traces[number].see(seen, row)
            traces[number].actions.append(actions[row].copy())
        steps = environment.step(running, actions[:, None])
        for row, number in enumerate(running):
            is_done[number] = bool(steps.success[row])
            traces[number].rewards.append(float(steps.rewards[row, 0]))
            traces[number].is_terminated = bool(steps.terminated[row])
        goes_on = ~(steps.terminated | steps.truncated)
        seen = Observations(
            {camera: images[goes_on] for camera, images in steps.observations.images.items()},
            steps.observations.state[goes_on],
            tuple(text for text, stays in zip(steps.observations.instructions, goes_on, strict=True) if stays),
        )
        running = [number for number, stays in zip(running, goes_on, strict=True) if stays]
    return [(done, trace.whole()) for done, trace in zip(is_done, traces, strict=True)]
