"""Small programs that test_forking.py runs as `python -m tests.distributed.programs HOW`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path


def describe() -> None:
    """Print what a process can know about itself."""
    known = {
        "arguments": sys.argv[1:],
        "folder": str(Path.cwd()),
        "path": sys.path[0],
        "variables": dict(os.environ),
        "temporary": tempfile.gettempdir(),
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "files": [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (0, 1, 2)],
        "open": len(list(Path("/proc/self/fd").iterdir())),
        "hash": hash("a word"),
        "torch": "torch" in sys.modules,
    }
    print(json.dumps(known))


def end_late() -> None:
    """Leave work for the time after the last line."""
    atexit.register(print, "last")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    print("main")


WAYS = {
    "describe": describe,
    "late": end_late,
    "exit": lambda: sys.exit(3),
    "raise": lambda: {}["no such thing"],
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "wait": lambda: time.sleep(60),
}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
