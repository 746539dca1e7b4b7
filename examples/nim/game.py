"""Nim of TextArena for a policy that plays against itself, and against a random player, by whom it is measured.

TextArena draws from global random numbers, so each of its games has a process of its own. Nim draws nothing: its games
share the rank's process, which is much faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from typing_extensions import override

from leaderless.environments.adapters.textarena_games import TextArena, TextArenaSolo
from leaderless.environments.protocol import Task, Turn

GAME = "Nim-v0"


class Nim(TextArena):
    """Nim for two players, who are both the policy. The task's column `piles` has the sizes with which it begins."""

    needs_own_process = False

    def __init__(self) -> None:
        super().__init__(GAME)

    @override
    def reset(self, task: Task, rng: Random) -> str:
        """Begin the game."""
        self._game.initial_piles = list(task["piles"])
        return super().reset(task, rng)


class AgainstRandom(TextArenaSolo):
    """Nim against a random player, with piles of 3, 4 and 5. The episode's random numbers draw who begins.

    The reward is 1 for a win, and 0 for a loss; two moves in a row that break the rules lose, too.
    """

    needs_own_process = False

    def __init__(self) -> None:
        super().__init__(GAME)

    @override
    def reset(self, task: Task, rng: Random) -> str:
        """Begin the game, with a random move if the policy has the second seat."""
        self._game.reset(num_players=2, seed=rng.getrandbits(31))
        self._rng, self._seat = rng, rng.randrange(2)
        self._let_opponent_move()
        return self._told()[1]

    @override
    def act(self, text: str) -> Turn:
        """Make the policy's move, and then a random one."""
        is_over, _ = self._game.step(action=text)
        if is_over or self._let_opponent_move():
            rewards, _ = self._game.close()
            return Turn(reward=float(rewards[self._seat] > 0), done=True)
        return Turn(self._told()[1])

    def _let_opponent_move(self) -> bool:
        """Move at random if it is the opponent's turn; whether the game is over."""
        state = self._game.state
        if state.current_player_id == self._seat:
            return False
        is_over, _ = self._game.step(action=random_move(state.game_state["piles"], self._rng))
        return bool(is_over)


def random_move(piles: Sequence[int], rng: Random) -> str:
    """A move that the rules allow: a pile that is not empty, and how many to take.

    Args:
        piles: Size of each pile.
        rng: Random numbers.
    """
    pile = rng.choice([number for number, size in enumerate(piles) if size])
    return f"[{pile} {rng.randint(1, piles[pile])}]"
