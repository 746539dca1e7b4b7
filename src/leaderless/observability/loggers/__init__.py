"""Loggers send the numbers of a run to trackers, each in a separate process that follows the folder of the run.

Training only writes its numbers to files, so a tracker that fails, hangs or is slow does not affect it.
"""
