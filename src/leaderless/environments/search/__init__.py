"""Searching as an action: retrievers, and the environment of Search-R1."""
