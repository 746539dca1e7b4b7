"""Environments of other packages, each an extra of this one. Imports no torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def needed(module: str, extra: str) -> ModuleType:
    """A module of an optional package.

    Raises:
        ModuleNotFoundError: The package is missing; the error says how to install it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        remedy = f"from a copy of the project, pip install --editable '.[{extra}]'"
        raise ModuleNotFoundError(f"there is no package '{error.name}': {remedy}", name=error.name) from error
