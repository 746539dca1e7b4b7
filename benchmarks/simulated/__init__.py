"""Simulated steps compared: many sizes of a run, and designs with a single controller."""
