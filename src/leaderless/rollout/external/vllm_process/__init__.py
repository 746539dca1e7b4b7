"""Code that runs where an engine is: in this process, or in one of an environment that has the engine.

Such an environment lacks what this package needs, so nothing in here imports more than the standard library, torch, the
engine itself, its neighbors, and modules of this package that import no more.
"""
