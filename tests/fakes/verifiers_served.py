"""Environments of verifiers, served by the package itself: `python -m tests.fakes.verifiers_served URL SETTINGS`."""

from __future__ import annotations

import json
import os
import sys

from verifiers.v1.serve import serve_env

import verifiers

if __name__ == "__main__":
    verifiers.__version__ = os.environ.get("FAKE_VERSION", verifiers.__version__)
    serve_env(max_workers=1, address=sys.argv[1], config_data=json.loads(sys.argv[2]))
