"""Environments of Gymnasium whose states can be written as text. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.adapters import needed
from leaderless.environments.protocol import Environment, Task, Turn

gymnasium = needed("gymnasium", "gymnasium")
ACTIONS: Mapping[str, Sequence[str]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
}
"""Names of the actions of toy texts, by the name of the environment without its version."""
INSTRUCTIONS: Mapping[str, str] = {
    "Blackjack": "The state is your sum, the dealer's card, and whether you have a usable ace.",
    "CliffWalking": "You are x. Reach T, and keep away from C.",
    "FrozenLake": "You are on red. Walk from S to G, and keep away from H.",
    "Taxi": "The taxi is on yellow, and on green with its passenger. The passenger is at blue, and wants to magenta.",
}
"""Explanation of the state for the policy, by the beginning of the environment's name."""
_COLORS = {"1": "red", "2": "green", "3": "yellow", "4": "blue", "5": "magenta", "6": "cyan", "7": "gray"}
_CODE = re.compile(r"\x1b\[([\d;]*)m")


class GymnasiumEnvironment(Environment):
    """An environment of Gymnasium with a few numbered actions, such as its toy texts.

    The policy is shown the state as Gymnasium draws it in text, with colors as words, or else as the observation's
    numbers, and names its next action. Of several actions in a message the last one counts; without
    one it gets the list of actions, and the world stands still.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - Gymnasium's own word
        *,
        actions: Sequence[str] = (),
        instructions: str | None = None,
        options: Mapping[str, Json] | None = None,
    ) -> None:
        """Make the environment.

        Args:
            id: Name with its version, such as `FrozenLake-v1`.
            actions: Names of the actions in their order; by default the toy texts' names, else numbers.
            instructions: Text before the first state; by default, an explanation of the states of a toy text.
            options: Arguments of the environment, such as `is_slippery`.

        Raises:
            RecipeError: There is no such environment, or its actions cannot be numbered or do not fit their names.
        """
        arguments = dict(options or {})
        try:
            self._world = gymnasium.make(id, **arguments)
            self._is_drawn = "ansi" in self._world.metadata.get("render_modes", ())
            if self._is_drawn:
                self._world = gymnasium.make(id, render_mode="ansi", **arguments)
        except (gymnasium.error.Error, TypeError) as error:
            raise RecipeError.at("environment.options", f"Gymnasium does not make '{id}': {error}") from error
        space = self._world.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise RecipeError.at("environment.options.id", f"'{id}' has actions {space}: they must be numbered")
        name = id.rpartition("/")[2].rpartition("-")[0]
        known = ACTIONS.get(name, [str(number) for number in range(space.n)])
        self._actions = [name.lower() for name in actions or known]
        if len(set(self._actions)) != space.n:
            raise RecipeError.at("environment.options.actions", f"are {self._actions}; '{id}' has {space.n} actions")
        self._first, self._instructions = int(space.start), instructions or ""
        if instructions is None:
            self._instructions = next((text for key, text in INSTRUCTIONS.items() if name.startswith(key)), "")

    @override
    def reset(self, task: Task, rng: Random) -> str:
        """Begin; a number in the task's column `seed` decides how, else the random numbers of the episode."""
        seed = task.get("seed")
        observation, _ = self._world.reset(seed=seed if isinstance(seed, int) else rng.getrandbits(31))
        parts = (self._instructions, f"Actions: {', '.join(self._actions)}.", self._state(observation))
        return "\n".join(part for part in parts if part)

    @override
    def act(self, text: str) -> Turn:
        """Take the named action."""
        action = named_action(text, self._actions)
        if action is None:
            return Turn(f"Name one of the actions: {', '.join(self._actions)}.")
        observation, reward, is_over, is_cut, _ = self._world.step(self._first + action)
        return Turn(self._state(observation), float(reward), bool(is_over or is_cut), info={"action": action})

    @override
    def close(self) -> None:
        """Release the environment."""
        self._world.close()

    def _state(self, observation: object) -> str:
        if not self._is_drawn:
            return f"State: {_plain(observation)}"
        return in_words(str(self._world.render())).strip()


def named_action(text: str, actions: Sequence[str]) -> int | None:
    """Number of the action that a text names last, as a whole word; None if it names none."""
    found = [
        (match.end(), len(name), number)
        for number, name in enumerate(actions)
        for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text.lower())
    ]
    return max(found)[2] if found else None


def in_words(text: str) -> str:
    """A text with its colors in words: `[B: blue]`, `[ : on yellow]`."""
    written, colors = "", dict[str, str]()
    for place, part in enumerate(_CODE.split(text)):
        if place % 2 == 0:
            written += f"[{part}: {' '.join(colors.values())}]" if colors and part else part
            continue
        for code in part.split(";"):
            if code in {"", "0"}:
                colors.clear()
            elif len(code) == 2 and code[0] in "34" and code[1] in _COLORS:
                colors[code[0]] = ("on " if code[0] == "4" else "") + _COLORS[code[1]]
    return written


def _plain(observation: object) -> object:
    """An observation as numbers of Python."""
    if isinstance(observation, tuple):
        return tuple(map(_plain, observation))
    return observation.tolist() if hasattr(observation, "tolist") else observation
