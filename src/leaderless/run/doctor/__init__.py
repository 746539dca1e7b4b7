"""Checks of machines before a run: what will go wrong there, and what to do about it."""
