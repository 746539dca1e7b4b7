"""What a step would take on a cluster that is described in a file: the real plan and assignment, modeled costs."""
