"""Serves a taskset of verifiers to runs on this machine: `python examples/verifiers/serve.py TASKSET ADDRESS`."""

from __future__ import annotations

import sys

from verifiers.v1.serve import serve_env

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 8}

if __name__ == "__main__":
    taskset, address = sys.argv[1:]
    serve_env(max_workers=4, address=address, config_data={"taskset": {"id": taskset}, "agent": AGENT})
