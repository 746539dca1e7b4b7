"""Stand-in for the package openenv; see `core`."""
