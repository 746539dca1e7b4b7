"""Environments of bodies: simulators and robots that step many episodes at once."""
