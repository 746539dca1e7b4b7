"""Meta-World's arm and its tasks, such as opening a door. Imports no torch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.embodied.simulators.protocol import Continuous, Floats, Spaces
from leaderless.embodied.simulators.saved_states import draw, pack, restore_mujoco, save_mujoco, unpack
from leaderless.embodied.simulators.single_envs import Single, SingleObservation, Singles, StepOutcome
from leaderless.environments.adapters import GL_REMEDY, needed
from leaderless.environments.protocol import Task

MT10 = (
    "reach",
    "push",
    "pick-place",
    "door-open",
    "drawer-open",
    "drawer-close",
    "button-press-topdown",
    "peg-insert-side",
    "window-open",
    "window-close",
)
"""Tasks of the benchmark MT10."""
STATE_SIZE = 39
LIMIT = 500
"""Steps after which Meta-World itself ends an episode."""
_Simulator = Any


class MetaWorld(Singles):
    """Tasks of Meta-World with the goal in the state, as in its benchmarks of several tasks.

    The column `task` of the dataset's row names the task of an episode; without it, the seed chooses. Where things
    and the goal are follows from the seed. The instruction is the name of the task in words. The expert is
    Meta-World's own scripted policy.
    """

    def __init__(
        self,
        num: int,
        tasks: Sequence[str] = MT10,
        *,
        max_steps: int = LIMIT,
        ends_on_success: bool = True,
        is_sparse: bool = False,
        image_size: int = 0,
        camera: str = "corner2",
    ) -> None:
        """Make the environments.

        Args:
            num: Number of episodes.
            tasks: Names of tasks, without their version.
            max_steps: Steps after which an episode is truncated, at most 500.
            ends_on_success: Whether success ends an episode.
            is_sparse: Whether the reward is 1 for success and else 0, in place of Meta-World's, which is up to 10.
            image_size: Pixels of a side of the camera's image; 0 for none.
            camera: Name of the camera, such as `corner`, `topview`, `behindGripper`.

        Raises:
            ModuleNotFoundError: A package is missing.
            ValueError: There is no such task, or the steps are too many.
            OSError: It cannot render here.
        """
        known = needed("metaworld.env_dict", "metaworld").ALL_V3_ENVIRONMENTS
        unknown = [name for name in tasks if f"{name}-v3" not in known]
        if unknown or not tasks:
            names = ", ".join(sorted(name.removesuffix("-v3") for name in known))
            raise ValueError(f"tasks={list(tasks)}: give some of {names}")
        if not 1 <= max_steps <= LIMIT:
            raise ValueError(f"max_steps={max_steps}: must be from 1 to {LIMIT}")
        rules = _Rules(tuple(tasks), max_steps, ends_on_success, is_sparse)
        super().__init__(num, partial(_Episode, rules, _Stock(image_size, camera)))


class _Rules(NamedTuple):
    tasks: tuple[str, ...]
    max_steps: int
    ends_on_success: bool
    is_sparse: bool


class _Stock:
    """Simulators by task, which episodes take and return: a model takes long to load."""

    def __init__(self, image_size: int, camera: str) -> None:
        self.image_size, self.camera = image_size, camera
        self.free: dict[str, list[_Simulator]] = {}

    def take(self, name: str) -> _Simulator:
        """A simulator of a task."""
        if self.free.get(name):
            return self.free[name].pop()
        drawn = {"render_mode": "rgb_array", "width": self.image_size, "height": self.image_size}
        options = {**drawn, "camera_name": self.camera} if self.image_size else {}
        one = needed("metaworld.env_dict", "metaworld").ALL_V3_ENVIRONMENTS[f"{name}-v3"](**options)
        one._set_task_called = True  # noqa: SLF001 - without it, goals come from a pickled list
        one._freeze_rand_vec, one.seeded_rand_vec = False, True  # noqa: SLF001
        one._partially_observable = False  # noqa: SLF001 - the goal is in the state,
        vars(one).pop("sawyer_observation_space", None)  # and is not clipped to the zeros that hid it until now
        return one

    def close(self) -> None:
        """Release those that are free."""
        for one in [one for free in self.free.values() for one in free]:
            one.close()
        self.free.clear()


class _Episode(Single):
    def __init__(self, rules: _Rules, stock: _Stock) -> None:
        self._rules, self._stock = rules, stock
        self._name, self._world = "", cast("_Simulator", None)
        cameras = {stock.camera: (stock.image_size, stock.image_size)} if stock.image_size else {}
        actions = Continuous((-1.0,) * 4, (1.0,) * 4)
        self.spaces = Spaces(cameras, STATE_SIZE, actions, rules.max_steps, has_instructions=True)
        if cameras:
            try:
                self.reset({}, 0)
            except Exception as error:
                raise OSError(f"Meta-World cannot render ({type(error).__name__}: {error}); {GL_REMEDY}") from error

    @override
    def reset(self, task: Task, seed: int) -> SingleObservation:
        name, known = task.get("task"), self._rules.tasks
        if name is None:
            name = known[int(np.random.default_rng(seed).integers(len(known)))]
        elif name not in known:
            raise ValueError(f"task '{name}' of the dataset is not one of {', '.join(known)}: add it to `tasks`")
        self._take(str(name))
        self._world.seed(seed)
        observation, _ = self._world.reset()
        return self._seen(observation)

    def _take(self, name: str) -> None:
        if self._name == name:
            return
        if self._name:
            self._stock.free.setdefault(self._name, []).append(self._world)
        self._world, self._name = self._stock.take(name), name

    @override
    def step(self, action: NDArray[np.generic]) -> StepOutcome:
        observation, reward, _, _, info = self._world.step(np.asarray(action, np.float64))
        is_success = bool(info["success"])
        is_over = self._rules.ends_on_success and is_success
        facts = {key: float(value) for key, value in info.items()}
        earned = float(is_success) if self._rules.is_sparse else float(reward)
        return StepOutcome(self._seen(observation), earned, is_over, False, is_success, {"task": self._name, **facts})

    def _seen(self, observation: NDArray[np.float64]) -> SingleObservation:
        images = {name: draw(self._world) for name in self.spaces.images}
        if self._stock.camera.startswith("corner"):  # these cameras hang upside down
            images = {name: image[::-1, ::-1].copy() for name, image in images.items()}
        return self._shown(images, observation)

    def _shown(self, images: dict[str, NDArray[np.uint8]], observation: NDArray[np.float64]) -> SingleObservation:
        self._observation = observation
        self._last = SingleObservation(images, observation.astype(np.float32), self._name.replace("-", " "))
        return self._last

    @override
    def expert(self) -> NDArray[np.generic]:
        policy = needed("metaworld.policies", "metaworld").ENV_POLICY_MAP[f"{self._name}-v3"]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of actions that are clipped here
            action = policy.get_action(self._observation)
        clipped: Floats = np.clip(action, -1, 1).astype(np.float32)
        return clipped

    @override
    def save(self) -> bytes:
        facts = {"name": self._name, "images": dict(self._last.images), "observation": self._observation}
        return pack({**facts, "inner": save_mujoco(self._world)})

    @override
    def restore(self, state: bytes) -> SingleObservation:
        saved = cast("dict[str, Any]", unpack(state))
        self._take(saved["name"])
        restore_mujoco(self._world, saved["inner"])
        return self._shown(saved["images"], saved["observation"])

    @override
    def close(self) -> None:
        if self._name:
            self._world.close()
        self._stock.close()
