"""What `benchmarks/data_coordinator.py` measures: the same rows, brought from one layout to another in several ways."""
