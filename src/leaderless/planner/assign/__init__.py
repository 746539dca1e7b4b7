"""Which rank gets which rows, and from whom: pure functions of facts that all ranks share. Imports no torch."""
