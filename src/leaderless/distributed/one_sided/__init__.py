"""Bytes from rank to rank by NIXL, NVIDIA's transfer library: see `endpoint`."""
