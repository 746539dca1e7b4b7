"""What runs where an engine is: in this process, or in one of an environment that has the engine and not this package.

So nothing in here imports more than the standard library, torch, its neighbours and the engine itself.
"""
