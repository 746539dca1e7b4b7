"""Policies that move bodies: simulators and robots, models that act, and what plays and trains them."""
