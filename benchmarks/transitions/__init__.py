"""The measurements of `benchmarks/data_coordinator.py`: the same rows, resharded in several ways."""
