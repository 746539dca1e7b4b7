"""torch, imported when something of it is first used: recipes are read, and plans made, without it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch
else:

    class _Torch:
        """Stands in for the module; importing torch takes seconds."""

        def __getattr__(self, name: str) -> object:
            found = getattr(import_module("torch"), name)
            setattr(self, name, found)  # the next use finds it without this
            return found

    torch = _Torch()
