"""Checks of a finished or stopped run by its proof: `leaderless verify`."""
