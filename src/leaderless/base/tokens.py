"""The key that servers of this package and their clients share."""

from __future__ import annotations

TOKEN_VARIABLE = "LEADERLESS_TOKEN"  # noqa: S105 - its name, not its value
"""Variable with the key of servers that other machines can reach."""
