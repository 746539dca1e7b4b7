"""The built-in policy losses, one file each. A new file here is a new type; nothing lists them."""

from leaderless.algorithms.policy_loss import PolicyLoss
from leaderless.algorithms.registry import built_in

POLICY_LOSSES = built_in(__name__, PolicyLoss)  # type: ignore[type-abstract]
