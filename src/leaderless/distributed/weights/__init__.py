"""Weights on their way from the ranks that hold them to those that use them: training, generation, export."""
