"""Tasks of Isaac Lab, all episodes in one simulation on a GPU. Imports no torch of its own.

It has not been run with Isaac Lab: a stand-in with the same interface checks each call. The interface comes from
`ManagerBasedRLEnv` and `DirectRLEnv` in Isaac Lab 2 (isaaclab/envs).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.embodied.simulators.protocol import Continuous, Floats, Observations, Spaces, Steps, VectorEnvironment
from leaderless.environments.protocol import Task

GROUP = "policy"
"""Group of observations that becomes the state."""
_Tensor = Any
_World = Any


class IsaacLab(VectorEnvironment):
    """A task of Isaac Lab, whose observations for a policy are the state.

    Isaac Lab resets episodes that are over within a step, before it observes. That is held back until an episode is
    asked for, so that the last observation is the true one. Episodes begin one by one, each with its own seed: the same
    seed gives the same start but for rounding, as places differ. All episodes of a simulation step together, so it has
    to be in the rank itself (`body.processes: 0`), and nothing is saved or restored.
    """

    def __init__(
        self,
        num: int,
        id: str = "Isaac-Reach-Franka-v0",  # noqa: A002 - Gymnasium's word for it
        *,
        device: str = "cuda:0",
        action_limit: float = 1.0,
        success: str | None = None,
        instruction: str = "",
    ) -> None:
        """Make the simulation.

        Args:
            num: Number of episodes.
            id: Name of the task.
            device: Device of the simulation.
            action_limit: Largest size of each number of an action, for which the task itself has no limit.
            success: Termination of the task that is a success; by default the one with this name, if there is one.
            instruction: Task in words.

        Raises:
            ModuleNotFoundError: Isaac Lab is missing.
            ValueError: There is no such task, or its spaces do not fit.
        """
        if num < 1 or action_limit <= 0:
            raise ValueError(f"num={num}, action_limit={action_limit}: must be at least 1, and above 0")
        self._torch, self._instruction, self._is_closed = import_module("torch"), instruction, False
        self._world = _made(id, num, device)
        self._reset_own = self._world._reset_idx  # noqa: SLF001 - what its step calls, and nothing else is called there
        try:
            self.spaces = self._spaces(id, action_limit)
            self._success = self._success_of(id, success)
        except BaseException:
            self.close()
            raise
        self._is_running = np.zeros(num, np.bool_)

    @property
    @override
    def repeats_starts(self) -> bool:
        return True

    def _spaces(self, name: str, limit: float) -> Spaces:
        shown, taken = self._world.single_observation_space[GROUP], self._world.single_action_space
        for what, space in (("observations", shown), ("actions", taken)):
            if len(getattr(space, "shape", None) or ()) != 1:
                raise ValueError(f"'{name}' has {what} {space}: they must be a row of numbers")
        dim, steps = taken.shape[0], int(self._world.max_episode_length)
        return Spaces({}, shown.shape[0], Continuous((-limit,) * dim, (limit,) * dim), steps, bool(self._instruction))

    def _success_of(self, name: str, success: str | None) -> str | None:
        """The name of the termination that is a success."""
        manager = getattr(self._world, "termination_manager", None)
        known = list(manager.active_terms) if manager is not None else []
        if success is not None and success not in known:
            raise ValueError(f"success='{success}': '{name}' has the terminations {', '.join(known) or 'of no name'}")
        return success or ("success" if "success" in known else None)

    @override
    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        state = np.zeros((len(which), self.spaces.state_size), np.float32)
        for row, (one, seed) in enumerate(zip(which, seeds, strict=True)):
            # Its generators take 32 bits.
            small = int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
            index = self._torch.tensor([one], device=self._world.device)
            shown, _ = self._world.reset(seed=small, env_ids=index)
            state[row] = _numbers(shown[GROUP])[one]
            self._is_running[one] = True
        return Observations({}, state, (self._instruction,) * len(which))

    @override
    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        rows, (num, chunk) = np.array(which, np.int64), actions.shape[:2]
        if not self._is_running[rows].all():
            raise RuntimeError(
                f"episodes {rows[~self._is_running[rows]].tolist()} are over, or were moved by a step of others: Isaac "
                "Lab steps all episodes together, so set body.processes to 0"
            )
        self._is_running[:] = False
        self._is_running[rows] = True
        ends = np.zeros((3, num), np.bool_)  # terminated, truncated, success
        rewards, counts = np.zeros((num, chunk), np.float32), np.zeros(num, np.int64)
        state = np.zeros((num, self.spaces.state_size), np.float32)
        limit = self.spaces.actions.high[0] if isinstance(self.spaces.actions, Continuous) else 1.0
        for place in range(chunk):
            is_on = self._is_running[rows]
            if not is_on.any():
                break
            given = np.zeros((len(self._is_running), actions.shape[2]), np.float32)
            given[rows[is_on]] = np.clip(actions[is_on, place], -limit, limit)
            shown, earned, ended = self._step_all(given)
            state[is_on], rewards[is_on, place] = shown[rows[is_on]], earned[rows[is_on]]
            counts[is_on] += 1
            ends[:, is_on] = ended[:, rows[is_on]]
            self._is_running[rows] &= ~(ends[0] | ends[1])
        seen = Observations({}, state, (self._instruction,) * num)
        return Steps(seen, rewards, counts, ends[0], ends[1] & ~ends[0], ends[2])

    def _step_all(self, actions: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """State, rewards and ends of all episodes after one step, in which none begins again."""
        world = self._world
        world._reset_idx = lambda _: None  # noqa: SLF001 - see above
        try:
            given = self._torch.from_numpy(actions).to(world.device)
            shown, reward, terminated, truncated, _ = world.step(given)
        finally:
            world._reset_idx = self._reset_own  # noqa: SLF001
        done = self._torch.zeros_like(terminated)
        if self._success is not None:
            done = world.termination_manager.get_term(self._success)
        ends = np.stack([one.cpu().numpy().astype(np.bool_) for one in (terminated, truncated, done)])
        return _numbers(shown[GROUP]), _numbers(reward), ends

    @override
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._world.close()


def _numbers(values: _Tensor) -> Floats:
    """A copy of a tensor on any device."""
    found: Floats = values.detach().cpu().numpy().astype(np.float32)
    return found


def _made(name: str, num: int, device: str) -> _World:
    """A simulation of a task, with observations without noise."""
    library = _library()
    gymnasium = import_module("gymnasium")
    try:
        config = library.parse_env_cfg(name, device=device, num_envs=num)
        group = getattr(getattr(config, "observations", None), GROUP, None)  # tasks of the direct kind have none
        if group is not None:
            if getattr(group, "history_length", None):
                raise ValueError(f"'{name}' shows several steps at once, which a partial reset would mix")
            group.enable_corruption = False
        return gymnasium.make(name, cfg=config).unwrapped
    except gymnasium.error.Error as error:
        raise ValueError(f"Isaac Lab does not make '{name}': {error}") from error


@cache
def _library() -> ModuleType:
    """Reader of the configurations of tasks; the application of Isaac Sim has to start before, once in a process."""
    try:
        launcher = import_module("isaaclab.app").AppLauncher
        _STARTED.append(launcher(headless=True).app)
        import_module("isaaclab_tasks")  # names the tasks
        return import_module("isaaclab_tasks.utils")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"there is no package '{error.name}': install Isaac Lab 2 with Isaac Sim as its documentation says, in the "
            "environment of this package",
            name=error.name,
        ) from error


_STARTED: list[object] = []
"""The application, which ends with the process."""
