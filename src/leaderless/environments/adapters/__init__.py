"""Environments of other packages, each an extra of this one. Imports no torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from leaderless.config.packaged_files import how_to_install

GL = "MUJOCO_GL"
"""Environment variable that names the way in which MuJoCo draws; its Python package then loads that library."""
GL_REMEDY = "without a display, apt-get install libosmesa6 and set MUJOCO_GL=osmesa, or MUJOCO_GL=egl with a GPU"


def needed(module: str, extra: str) -> ModuleType:
    """A module of an optional package.

    Raises:
        ModuleNotFoundError: The package is missing; the error says how to install it.
        OSError: The library of OpenGL is missing; the error says how to install it.
    """
    try:
        with graphics():
            return import_module(module)
    except ModuleNotFoundError as error:
        text = f"there is no package '{error.name}': {how_to_install(extra)}"
        raise ModuleNotFoundError(text, name=error.name) from error


@contextmanager
def graphics() -> Iterator[None]:
    """Explain errors of packages that load OpenGL when they are imported.

    Raises:
        OSError: Its library is missing; the error says how to install it.
    """
    try:
        yield
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        places = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(place.partition(".")[0] == "OpenGL" for place in places):
            raise
        raise OSError(
            f"OpenGL cannot be loaded with {GL}={os.environ.get(GL, '')} ({error}); {GL_REMEDY}; where no images are "
            f"drawn, unset {GL}"
        ) from error
