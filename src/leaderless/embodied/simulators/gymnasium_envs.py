"""Environments of Gymnasium, with MuJoCo, Fetch, panda-gym and PushT among them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config.packaged_files import how_to_install
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Floats, Spaces
from leaderless.embodied.simulators.saved_states import draw, is_mujoco, pack, restore_mujoco, save_mujoco, unpack
from leaderless.embodied.simulators.single_envs import Single, SingleObservation, Singles, StepOutcome
from leaderless.environments.adapters import GL_REMEDY, graphics, needed
from leaderless.environments.protocol import Task

if TYPE_CHECKING:
    import gymnasium

CAMERA = "camera"
"""Name of the images of an environment that has only one kind."""
EXTRAS: Mapping[str, str] = {"gymnasium_robotics": "fetch", "gym_pusht": "pusht", "panda_gym": "panda"}
"""Extras of this package that install packages of environments."""


class GymnasiumBody(Singles):
    """An environment of Gymnasium with actions that are numbers or one of several choices.

    Images, which are uint8 of three colors, become cameras. All else that is observed, a goal as well, becomes the
    state, one after the other. Success is what the info says under `is_success` or `success`.
    """

    def __init__(
        self,
        num: int,
        id: str,  # noqa: A002 - Gymnasium's own word
        *,
        max_steps: int | None = None,
        image_size: int = 0,
        instruction: str = "",
        ends_on_success: bool = False,
        success_return: float | None = None,
        options: Mapping[str, Json] | None = None,
    ) -> None:
        """Make the environments.

        Args:
            num: Number of episodes.
            id: Name with its version, such as `HalfCheetah-v5`; `gymnasium_robotics:FetchReach-v4` imports the package.
            max_steps: Steps after which an episode is truncated; by default as registered.
            image_size: Pixels of a side of a rendered image, which becomes a camera; 0 for none.
            instruction: Instruction of all episodes.
            ends_on_success: Whether success ends an episode.
            success_return: Sum of rewards from which an episode is a success, if the environment does not say.
            options: Arguments of the environment.

        Raises:
            ModuleNotFoundError: A package is missing.
            ValueError: There is no such environment, or its spaces do not fit.
            OSError: It cannot render here, or loads a library of OpenGL that is missing.
        """
        make = partial(_Gym, id, max_steps, image_size, instruction, ends_on_success, success_return, options or {})
        super().__init__(num, make)


class Panda(GymnasiumBody):
    """A Panda arm in panda-gym, by default reaching a point; ids are `PandaReach-v3`, `PandaPush-v3`, and so on."""

    def __init__(
        self,
        num: int,
        id: str = "PandaReach-v3",  # noqa: A002 - Gymnasium's own word
        *,
        ends_on_success: bool = False,
        reward_type: str = "sparse",
    ) -> None:
        """Make the environments.

        Args:
            num: Number of episodes.
            id: Name with its version.
            ends_on_success: Whether success ends an episode.
            reward_type: `sparse`, or `dense` for the negative distance.
        """
        needed("panda_gym", "panda")
        super().__init__(num, id, ends_on_success=ends_on_success, options={"reward_type": reward_type})


class PushT(GymnasiumBody):
    """A disc that has to push a T to its place, seen from above; an action is where the disc has to go."""

    def __init__(self, num: int, *, max_steps: int = 300, has_images: bool = True) -> None:
        """Make the environments.

        Args:
            num: Number of episodes.
            max_steps: Steps after which an episode is truncated.
            has_images: Whether the state is the disc's place and an image of 96 x 96 is shown; else the state is all.
        """
        needed("gym_pusht", "pusht")
        kind = "pixels_agent_pos" if has_images else "state"
        super().__init__(num, "gym_pusht/PushT-v0", max_steps=max_steps, options={"obs_type": kind})


class _Gym(Single):
    """One environment of Gymnasium."""

    def __init__(
        self,
        name: str,
        max_steps: int | None,
        image_size: int,
        instruction: str,
        ends_on_success: bool,
        success_return: float | None,
        options: Mapping[str, Json],
    ) -> None:
        library = needed("gymnasium", "gymnasium")
        package, _, name = name.rpartition(":")
        if package:
            needed(package, EXTRAS.get(package, package))
        drawn = {"render_mode": "rgb_array", "width": image_size, "height": image_size} if image_size else {}
        try:
            with graphics():
                self._world: gymnasium.Env[Any, Any] = library.make(
                    name, max_episode_steps=-1, disable_env_checker=True, **{**drawn, **options}
                )
            registered = library.spec(name).max_episode_steps
        except library.error.DependencyNotInstalled as error:
            raise ModuleNotFoundError(f"'{name}' lacks a package: {error}") from error
        except (library.error.Error, TypeError) as error:
            raise ValueError(
                f"Gymnasium does not make '{name}': {error} (environments of a package are named as in "
                "'gymnasium_robotics:FetchReach-v4')"
            ) from error
        except AssertionError as error:  # FetchReach raises a bare one with mujoco 4
            extra, said = EXTRAS.get(package, "mujoco"), str(error) or "AssertionError"
            raise ValueError(
                f"'{name}' fails in a check of its own ({said}), as where a package is newer than "
                f"it can use; this installs versions that fit: {how_to_install(extra)}"
            ) from error
        limit = registered if max_steps is None else max_steps
        if limit is None or limit < 1:
            raise ValueError(f"'{name}' has no end (max_steps={max_steps}): give max_steps, at least 1")
        self._reader = _Reader(self._world.observation_space, name)
        self._image_size, self._instruction = image_size, instruction
        self._ends_on_success, self._success_return = ends_on_success, success_return
        self._return, self._has_begun = 0.0, False
        cameras = dict(self._reader.images) | ({CAMERA: (image_size, image_size)} if image_size else {})
        actions = _actions(self._world.action_space, name)
        self._first = 0 if isinstance(actions, Continuous) else int(self._world.action_space.start)
        self.spaces = Spaces(cameras, self._reader.state_size, actions, limit, bool(instruction))
        if image_size:
            try:
                self.reset({}, 0)
            except Exception as error:
                self._world.close()
                raise OSError(f"'{name}' cannot be rendered ({type(error).__name__}: {error}); {GL_REMEDY}") from error

    @override
    def reset(self, task: Task, seed: int) -> SingleObservation:
        observation, _ = self._world.reset(seed=seed)
        self._return, self._has_begun = 0.0, True
        return self._seen(observation)

    @override
    def step(self, action: NDArray[np.generic]) -> StepOutcome:
        given = action if isinstance(self.spaces.actions, Continuous) else self._first + int(action)
        observation, reward, is_terminated, is_truncated, info = self._world.step(given)
        self._return += float(reward)
        said = info.get("is_success", info.get("success"))
        is_rich = self._success_return is not None and self._return >= self._success_return
        is_success = is_rich if said is None else bool(said)
        is_over = bool(is_terminated) or (self._ends_on_success and is_success)
        facts = {key: np.asarray(one).item() for key, one in info.items() if np.isscalar(one)}
        return StepOutcome(self._seen(observation), float(reward), is_over, bool(is_truncated), is_success, facts)

    def _seen(self, observation: object) -> SingleObservation:
        images, state = self._reader.read(observation)
        if self._image_size:
            images[CAMERA] = draw(self._world.unwrapped)
        self._last = SingleObservation(images, state, self._instruction)
        return self._last

    @override
    def save(self) -> bytes | None:
        if not is_mujoco(self._world.unwrapped):
            return None
        inner = save_mujoco(self._world.unwrapped)
        facts = {"return": self._return, "images": dict(self._last.images), "state": self._last.state}
        return pack({**facts, "inner": inner})

    @override
    def restore(self, state: bytes) -> SingleObservation:
        if not self._has_begun:
            self.reset({}, 0)
        saved = cast("dict[str, Any]", unpack(state))
        restore_mujoco(self._world.unwrapped, saved["inner"])
        self._return = saved["return"]
        self._last = SingleObservation(saved["images"], saved["state"], self._instruction)
        return self._last

    @override
    def close(self) -> None:
        self._world.close()


class _Reader:
    """Divides observations into images and one state.

    Attributes:
        images: Height and width of each camera.
        state_size: Numbers of the state.
    """

    def __init__(self, space: gymnasium.Space[Any], name: str) -> None:
        kinds = needed("gymnasium", "gymnasium").spaces
        self.images: dict[str, tuple[int, int]] = {}
        self._numbers: list[tuple[str, Any]] = []
        self._is_mapping, self._flatten = isinstance(space, kinds.Dict), kinds.flatten
        for key, part in (space.spaces if isinstance(space, kinds.Dict) else {CAMERA: space}).items():
            if isinstance(part, kinds.Box) and part.dtype == np.uint8 and part.shape[2:] == (3,):
                self.images[key] = part.shape[0], part.shape[1]
            elif part.is_np_flattenable:
                self._numbers.append((key, part))
            else:
                raise ValueError(f"'{name}' shows '{key}' as {part}: only images and what has a fixed size can be read")
        self.state_size = sum(kinds.flatdim(part) for _, part in self._numbers)

    def read(self, observation: object) -> tuple[dict[str, NDArray[np.uint8]], Floats]:
        """Images, and the state [state_size] float32; choices are one-hot."""
        parts = cast("Mapping[str, object]", observation) if self._is_mapping else {CAMERA: observation}
        images = {key: np.array(parts[key], np.uint8) for key in self.images}
        numbers = [np.asarray(self._flatten(part, parts[key]), np.float32) for key, part in self._numbers]
        return images, np.concatenate(numbers) if numbers else np.zeros(0, np.float32)


def _actions(space: gymnasium.Space[Any], name: str) -> Continuous | Discrete:
    """Form of an action."""
    kinds = needed("gymnasium", "gymnasium").spaces
    if isinstance(space, kinds.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, kinds.Box) and len(space.shape) == 1 and np.isfinite([space.low, space.high]).all():
        return Continuous(tuple(map(float, space.low)), tuple(map(float, space.high)))
    raise ValueError(
        f"'{name}' has actions {space}: they must be one of several choices, or a row of numbers with finite bounds; "
        "register it with a wrapper, such as gymnasium.wrappers.RescaleAction or FlattenAction"
    )
