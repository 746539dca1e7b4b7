"""`python -m leaderless.algorithms`: all algorithms, with formula and source."""

from rich.console import Console

from leaderless.algorithms.catalogue import show

if __name__ == "__main__":
    show(Console())
