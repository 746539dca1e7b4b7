"""Libraries that move rows and weights in tests, in place of torch: NIXL, or a stand-in for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

STAND_IN = Path(__file__).parent / "fakes/nixl_environment"
VARIABLE = "LEADERLESS_TESTS_TRANSPORT"
"""Environment variable that `pytest --transport` sets, for the ranks of all tests."""
HAS_NIXL = find_spec("nixl") is not None


@contextmanager
def moved_by(name: str) -> Iterator[list[Any]]:
    """Let each `Transport` that is made here move rows and weights by `torch`, `nixl`, or NIXL's `stand-in`.

    Yields the endpoints that are made. They are closed at the end.
    """
    if name == "torch":
        yield []
        return
    with stand_in_path() if name == "stand-in" else patch.dict({}):
        from torch import distributed

        from leaderless.distributed.one_sided.endpoint import NixlEndpoint
        from leaderless.distributed.transport import Transport

        make, made = Transport.__init__, list[NixlEndpoint]()

        def init(self: Transport, *args: Any, **options: Any) -> None:
            if distributed.get_world_size() > 1 and "endpoint" not in options:
                made.append(NixlEndpoint(distributed.get_rank()))
                options["endpoint"] = made[-1]
            make(self, *args, **options)

        with patch.object(Transport, "__init__", init):
            try:
                yield made
            finally:
                for endpoint in made:
                    endpoint.close()


@contextmanager
def stand_in_path() -> Iterator[None]:
    """Let `nixl` be the stand-in."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "nixl"}
    sys.path.insert(0, str(STAND_IN))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
            del sys.modules[name]
        sys.modules.update(kept)
