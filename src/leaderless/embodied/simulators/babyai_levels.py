"""The levels of BabyAI: rooms with colored things, and missions in words. Imports no torch."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.embodied.simulators.protocol import Discrete, Spaces
from leaderless.embodied.simulators.single_envs import Single, SingleObservation, Singles, StepOutcome
from leaderless.environments.adapters import needed
from leaderless.environments.protocol import Task

VIEW = "view"
"""Name of the camera: the seven by seven cells in front of the agent, who is below in the middle and looks up."""
CELLS = 7
KINDS = (11, 6, 3)
"""Number of kinds of things, of colors, and of states of doors."""
ACTIONS = ("left", "right", "forward", "pick up", "drop", "toggle", "done")


class BabyAI(Singles):
    """Levels of BabyAI, of which minigrid has about a hundred. The mission is the instruction.

    Images are put together from tiles, which gives the pixels of minigrid's own drawing in a fraction of its time.
    The state is the compass in any case; without images, it is followed by what each cell holds, one-hot. The expert is
    BabyAI's own bot.
    """

    def __init__(
        self,
        num: int,
        id: str = "BabyAI-GoToRedBallGrey-v0",  # noqa: A002 - Gymnasium's own word
        *,
        max_steps: int = 64,
        num_actions: int = len(ACTIONS),
        tile_size: int = 8,
    ) -> None:
        """Make the environments.

        Args:
            num: Number of episodes.
            id: Name of the level with its version.
            max_steps: Steps after which an episode is truncated; the reward is less the more of them are used.
            num_actions: Number of actions that can be chosen, in the order of left, right, forward, pick up, drop,
                toggle, done; three are enough to go somewhere.
            tile_size: Pixels of a side of a cell; 0 for a state without images.
        """
        if max_steps < 1 or not 2 <= num_actions <= len(ACTIONS) or tile_size < 0:
            raise ValueError(
                f"max_steps={max_steps}, num_actions={num_actions}, tile_size={tile_size}: there must be a step, 2 to "
                f"{len(ACTIONS)} actions, and no negative tiles"
            )
        tiles = _Tiles(tile_size) if tile_size else None
        super().__init__(num, partial(_Level, id, max_steps, num_actions, tiles))


class _Level(Single):
    def __init__(self, name: str, max_steps: int, num_actions: int, tiles: _Tiles | None) -> None:
        library = needed("gymnasium", "babyai")
        needed("minigrid", "babyai")
        try:
            self._world = library.make(name, max_steps=max_steps, disable_env_checker=True).unwrapped
        except (library.error.Error, TypeError) as error:
            raise ValueError(f"minigrid does not make '{name}': {error}") from error
        self._tiles = tiles
        self._bot: Any = None
        self._advice = 0
        cameras = {VIEW: (CELLS * tiles.size, CELLS * tiles.size)} if tiles else {}
        state_size = 4 if tiles else 4 + CELLS * CELLS * sum(KINDS)
        self.spaces = Spaces(cameras, state_size, Discrete(num_actions), max_steps, has_instructions=True)

    @override
    def reset(self, task: Task, seed: int) -> SingleObservation:
        with redirect_stdout(io.StringIO()):  # it prints each mission that it rejects
            observation, _ = self._world.reset(seed=seed)
        self._bot = None
        return self._seen(observation)

    @override
    def step(self, action: NDArray[np.generic]) -> StepOutcome:
        observation, reward, is_terminated, is_truncated, _ = self._world.step(int(action))
        if is_terminated or is_truncated:
            self._bot = None
        if self._bot is not None:
            try:
                self._advice = int(self._bot.replan(int(action)))
            except Exception:  # noqa: BLE001 - the bot fails in many ways where others act worse than it would
                self._bot = None  # a new one takes its place when it is asked again
        is_success = bool(is_terminated) and reward > 0
        return StepOutcome(self._seen(observation), float(reward), bool(is_terminated), bool(is_truncated), is_success)

    @override
    def expert(self) -> NDArray[np.generic]:
        if self._bot is None:
            self._bot = needed("minigrid.utils.baby_ai_bot", "babyai").BabyAIBot(self._world)
            self._advice = int(self._bot.replan())
        if self._advice >= self.spaces.actions.num_choices:  # type: ignore[union-attr]
            raise ValueError(f"the bot wants to {ACTIONS[self._advice]}: set num_actions to {self._advice + 1} or more")
        return np.int64(self._advice)  # type: ignore[return-value]

    @override
    def close(self) -> None:
        self._world.close()

    def _seen(self, observation: dict[str, Any]) -> SingleObservation:
        cells, mission = observation["image"], str(observation["mission"])
        compass = np.zeros(4, np.float32)
        compass[int(observation["direction"])] = 1
        if self._tiles is not None:
            return SingleObservation({VIEW: self._tiles.draw(cells)}, compass, mission)
        # Kind, color and state of each cell as [7 * 7 * 20] zeros and ones.
        parts = [np.eye(count, dtype=np.float32)[cells[..., part]] for part, count in enumerate(KINDS)]
        return SingleObservation({}, np.concatenate([compass, np.concatenate(parts, axis=-1).reshape(-1)]), mission)


class _Tiles:
    """Pictures of all that a cell can hold.

    Attributes:
        size: Pixels of a side.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        things = needed("minigrid.core.world_object", "babyai").WorldObj
        grid = needed("minigrid.core.grid", "babyai").Grid
        shape = (*KINDS, size, size, 3)
        self._alone, self._with_agent = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        for place in np.ndindex(*KINDS):
            if place[0] == KINDS[0] - 1:
                continue  # the agent is drawn on top of what is in its cell
            thing = things.decode(*place)
            self._alone[place] = grid.render_tile(thing, None, highlight=place[0] > 0, tile_size=size)
            self._with_agent[place] = grid.render_tile(thing, 3, highlight=True, tile_size=size)

    def draw(self, cells: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The image of cells [7 to the right, 7 down, 3]."""
        kinds, colors, states = np.moveaxis(cells, 2, 0)
        tiles = self._alone[kinds, colors, states]
        here = CELLS // 2, CELLS - 1
        tiles[here] = self._with_agent[tuple(cells[here])]
        side = CELLS * self.size
        image: NDArray[np.uint8] = tiles.transpose(1, 2, 0, 3, 4).reshape(side, side, 3)
        return image
