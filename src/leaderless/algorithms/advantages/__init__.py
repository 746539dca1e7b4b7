"""The built-in advantages, one file each. A new file here is a new type; nothing lists them."""

from leaderless.algorithms.advantage import Advantage
from leaderless.algorithms.algorithm import built_in

ADVANTAGES = built_in(__name__, Advantage)  # type: ignore[type-abstract]
