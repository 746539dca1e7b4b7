"""The version of this package, and whether those that it needs are there, in versions with which it works.

Imports none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

VERSION = "0.1.0"
REMEDY = "pip install --upgrade leaderless, in this environment"
"""Remedy for packages of other versions."""


def source_hash() -> str:
    """A hash of this package's source, which must be the same on all machines of a run."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def unfit_versions() -> Iterator[str]:
    """Yield a line for each package that is missing, or of a version that is too old or not known yet.

    A source tree that is not installed does not say what it needs: nothing is yielded there.
    """
    from packaging.requirements import Requirement

    try:
        needed = requires("leaderless") or ()
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, needed):
        if requirement.marker is not None:
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found}, but must be {requirement.specifier}"
