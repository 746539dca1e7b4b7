"""Environments of Gymnasium whose actions have no bounds, or that cannot be made."""

import gymnasium
import numpy as np


class Odd(gymnasium.Env):
    """It is never stepped."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))


gymnasium.register("Odd-v0", Odd, max_episode_steps=5)


class Unmade(gymnasium.Env):
    """A package that it needs is too new."""

    def __init__(self):
        assert False  # noqa: B011, PT015 - as in packages


gymnasium.register("Unmade-v0", Unmade, max_episode_steps=5)
gymnasium.register("Drawing-v0", "tests.unit.embodied.drawing:World", max_episode_steps=5)
