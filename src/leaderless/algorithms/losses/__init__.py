"""The built-in policy losses, one file each. A new file here is a new type; nothing lists them."""

from leaderless.algorithms.algorithm import built_in
from leaderless.algorithms.policy_loss import PolicyLoss

POLICY_LOSSES = built_in(__name__, PolicyLoss)  # type: ignore[type-abstract]
