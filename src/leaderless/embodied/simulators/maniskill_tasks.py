"""ManiSkill's arms and tasks, in SAPIEN on the CPU. Imports no torch of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.embodied.simulators.single_envs import Single, SingleObservation, Singles, StepOutcome
from leaderless.environments.adapters import needed
from leaderless.environments.protocol import Task

REMEDY = (
    "SAPIEN needs a Vulkan driver also where nothing is drawn: without a GPU, Mesa 25 or later has one for the CPU "
    "(on Debian 12: apt-get install -t bookworm-backports mesa-vulkan-drivers)"
)
"""Remedy where SAPIEN finds no driver."""
REWARDS = ("sparse", "dense", "normalized_dense")
"""Rewards that ManiSkill has."""
_Simulator = Any
_Shown = Any


class ManiSkill(Singles):
    """Tasks of ManiSkill 3, one scene for each episode.

    Success ends an episode, and so does a failure that the task knows. Scenes that differ from episode to episode, as
    with things drawn from a set, are made anew by the seed. An episode is restored by its start and its actions, which
    gives the same numbers bit for bit.
    """

    def __init__(
        self,
        num: int,
        id: str = "PickCube-v1",  # noqa: A002 - Gymnasium's word for it
        *,
        max_steps: int = 50,
        image_size: int = 0,
        reward: str = "sparse",
        control_mode: str = "pd_ee_delta_pose",
        instruction: str = "",
        options: Mapping[str, Json] | None = None,
    ) -> None:
        """Make the environments.

        Args:
            num: Number of episodes.
            id: Name of the task.
            max_steps: Steps after which an episode is truncated.
            image_size: Pixels of a side of each camera's image, which then stands for what the state says of things; 0
                for a state that says all.
            reward: Reward of a step: `sparse`, `dense` or `normalized_dense`.
            control_mode: Meaning of the numbers of an action, such as `pd_joint_delta_pos`.
            instruction: Task in words.
            options: Further arguments of the task.

        Raises:
            ModuleNotFoundError: The package is missing.
            ValueError: There is no such task, or an argument is not one of its.
            OSError: There is no driver for SAPIEN.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: must be at least 1")
        if reward not in REWARDS:
            raise ValueError(f"reward='{reward}': must be one of {', '.join(REWARDS)}")
        settings = {"reward_mode": reward, "control_mode": control_mode, **(options or {})}
        super().__init__(num, partial(_Scene, id, max_steps, image_size, instruction, settings))


class _Scene(Single):
    """One scene."""

    def __init__(
        self, name: str, max_steps: int, image_size: int, instruction: str, settings: Mapping[str, Json]
    ) -> None:
        library = needed("gymnasium", "maniskill")
        needed("mani_skill.envs", "maniskill")
        drawn: dict[str, object] = {"obs_mode": "state", "render_backend": "none"}
        if image_size:
            sizes = {"width": image_size, "height": image_size}
            drawn = {"obs_mode": "rgb", "render_backend": "cpu", "sensor_configs": sizes}
        try:
            made = library.make(name, num_envs=1, sim_backend="physx_cpu", **{**drawn, **settings})
        except RuntimeError as error:
            raise OSError(f"ManiSkill does not make '{name}': {error}; {REMEDY}") from error
        except (library.error.Error, TypeError, KeyError, NotImplementedError, AssertionError) as error:
            raise ValueError(f"ManiSkill does not make '{name}' with {dict(settings)}: {error!r}") from error
        self._world: _Simulator = made.unwrapped
        self._instruction = instruction
        self._flatten = needed("mani_skill.utils.common", "maniskill").flatten_state_dict
        space = self._world.single_action_space
        if not isinstance(space, library.spaces.Box):
            raise ValueError(f"'{name}' has actions {space}: they must be a row of numbers, as of one arm")
        self.spaces = Spaces({}, 0, Continuous(tuple(map(float, space.low)), tuple(map(float, space.high))), max_steps)
        seen = self.reset({}, 0)
        cameras = {camera: (pixels.shape[0], pixels.shape[1]) for camera, pixels in seen.images.items()}
        self.spaces = Spaces(cameras, len(seen.state), self.spaces.actions, max_steps, bool(instruction))

    @override
    def reset(self, task: Task, seed: int) -> SingleObservation:
        # Its generators take 32 bits; all of them follow from the seed.
        small = int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
        options = {"reconfigure": True} if self._world.reconfiguration_freq != 0 else {}
        observation, _ = self._world.reset(seed=small, options=options)
        return self._seen(observation)

    @override
    def step(self, action: NDArray[np.generic]) -> StepOutcome:
        observation, reward, is_over, _, info = self._world.step(np.asarray(action, np.float32))
        facts = {key: value.item() for key, value in info.items() if hasattr(value, "item") and value.numel() == 1}
        is_success = bool(facts.get("success", False))
        return StepOutcome(self._seen(observation), float(reward[0]), bool(is_over[0]), False, is_success, facts)

    def _seen(self, observation: _Shown) -> SingleObservation:
        if not isinstance(observation, Mapping):
            return SingleObservation({}, observation[0].numpy().astype(np.float32), self._instruction)
        sensors = observation["sensor_data"].items()
        images = {camera: shown["rgb"][0].numpy().copy() for camera, shown in sensors if "rgb" in shown}
        numbers = {part: observation[part] for part in ("agent", "extra") if observation.get(part)}
        state = self._flatten(numbers, use_torch=True)[0].numpy().astype(np.float32)
        return SingleObservation(images, state, self._instruction)

    @override
    def close(self) -> None:
        self._world.close()
