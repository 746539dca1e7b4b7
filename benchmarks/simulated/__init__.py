"""Comparison of simulated steps: many sizes of a run, and designs with a single controller."""
