"""An environment of Gymnasium whose actions have no bounds."""

import gymnasium
import numpy as np


class Odd(gymnasium.Env):
    """It is never stepped."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))


gymnasium.register("Odd-v0", Odd, max_episode_steps=5)
