"""Writes the jobs of schedulers, which start `leaderless train` on several machines. Imports no torch."""
