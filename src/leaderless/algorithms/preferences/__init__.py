"""The built-in losses of preferences, one file each. A new file here is a new type; nothing lists them."""

from leaderless.algorithms.algorithm import built_in
from leaderless.algorithms.preference_loss import PreferenceLoss

PREFERENCE_LOSSES = built_in(__name__, PreferenceLoss)  # type: ignore[type-abstract]
