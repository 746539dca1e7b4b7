"""Two demonstrations that begin with nothing, run on a CPU, and take a few minutes."""
