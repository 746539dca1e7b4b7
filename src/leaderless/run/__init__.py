"""The life of a run: its folder, its workers, its report. The command line and Python programs use it alike."""
