"""Duration of a step on a cluster that is described in a file: the real plan and assignment, modeled costs."""
