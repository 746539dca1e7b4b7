"""Games of TextArena, for one player and for two who share the policy. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.adapters import needed
from leaderless.environments.protocol import Environment, Task, Turn

package = needed("textarena", "textarena")  # here, so that processes are forked with it
RAW = "-raw"
"""Ending of the names of games that tell a player only what is new, without what was said before."""


class TextArenaSolo(Environment):
    """A game of TextArena for one player.

    The reward at the end comes from the game. The package draws random numbers from the module `random`, which all
    episodes of a process would share; so each episode has a process of its own.
    """

    needs_own_process: bool = True

    def __init__(self, id: str, *, options: Mapping[str, Json] | None = None) -> None:  # noqa: A002 - the package's own word
        """Make the game.

        Args:
            id: Name with its version, such as `GuessTheNumber-v0`.
            options: Arguments of the game.

        Raises:
            RecipeError: There is no such game.
        """
        try:
            self._game = package.make(id.removesuffix(RAW) + RAW, **(options or {}))
        except (ValueError, TypeError) as error:
            raise RecipeError.at("environment.options", f"TextArena does not make '{id}': {error}") from error
        self._agent_of: dict[int, str] = {}  # players by their numbers, in the order in which they act first

    @override
    def reset(self, task: Task, rng: Random) -> str:
        """Begin the game."""
        self._game.reset(num_players=len(self.agents), seed=rng.getrandbits(31))
        return self._told()[1]

    @override
    def act(self, text: str) -> Turn:
        """Make the player's move."""
        is_over, _ = self._game.step(action=text)
        if not is_over:
            agent, observation = self._told()
            return Turn(observation, agent=agent)
        rewards, facts = self._game.close()
        reasons = {str(one["reason"]) for one in facts.values() if isinstance(one, Mapping) and "reason" in one}
        # Who has not made a move yet has said nothing that could be rewarded.
        earned = {self._agent_of[number]: float(value) for number, value in rewards.items() if number in self._agent_of}
        return Turn(reward=earned, done=True, info={"reason": " ".join(sorted(reasons))})

    def _told(self) -> tuple[str, str]:
        """Who acts next, and what is new for that player."""
        player, news = self._game.get_observation()
        if player not in self._agent_of:
            self._agent_of[player] = self.agents[len(self._agent_of)]
        lines = [text if sender < 0 else f"[Player {sender}] {text}" for sender, text, _ in news if sender != player]
        return self._agent_of[player], "\n".join(line.strip() for line in lines)


class TextArena(TextArenaSolo):
    """A game of TextArena for two players, who are both played by the policy; otherwise as `TextArenaSolo`.

    Agents are named by who acts first, which in some games is drawn. The game gives them their numbers.
    """

    agents: Sequence[str] = ("first", "second")
