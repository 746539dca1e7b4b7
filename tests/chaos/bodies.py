"""An environment of a body, in a module that kills the worker it is loaded into at a chosen moment; see `stage`."""

from __future__ import annotations

import tests.chaos.stage  # noqa: F401 - it kills
from tests.small_worlds import Line

__all__ = ["Line"]
