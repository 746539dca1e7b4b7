"""Errors of the data coordinator that others tell apart. Imports no torch."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A rank did not get what it waited for from its peers."""
