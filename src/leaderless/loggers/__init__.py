"""Loggers: what sends the numbers of a run to a tracker, in a process of its own that follows the folder of the run.

Training writes its numbers to files and knows of no tracker. So a tracker that fails, hangs or is slow costs nothing.
"""
