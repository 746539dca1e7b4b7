"""Modules of earlier versions that have another name now: an error names it to code that imports one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_ROOT = "leaderless."


@cache
def moved_modules() -> Mapping[str, str]:
    """New names of modules and packages by their earlier ones."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return {_ROOT + earlier: _ROOT + new for earlier, new in map(str.split, lines)}


class MovedModules(MetaPathFinder):
    """A finder that finds no module, and names the new one where custom code imports an earlier one."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find nothing.

        Raises:
            ModuleNotFoundError: The module has another name now.
        """
        if fullname.startswith(_ROOT) and (new := moved_modules().get(fullname)):
            raise ModuleNotFoundError(f"module '{fullname}' is now '{new}': import that", name=fullname)
        return None
