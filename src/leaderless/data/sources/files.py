"""Which files a dataset is made of. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from leaderless.config import RecipeError
from leaderless.config.data import COMPRESSED, DatasetConfig
from leaderless.config.packaged_files import how_to_make

SUFFIXES = (".jsonl", ".parquet", COMPRESSED)
"""Suffixes of files that are read."""


def find_files(config: DatasetConfig, key: str) -> list[Path] | None:
    """The files that match the name of a file, folder or pattern; None if it must be on the hub."""
    path = Path(config.path)
    is_pattern = any(character in config.path for character in "*?[") and not path.exists()
    if path.is_dir() or is_pattern:
        found = path.iterdir() if not is_pattern else Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        files = sorted(file for file in found if file.name.endswith(SUFFIXES))
        if not files:
            kinds = f"no .jsonl, .parquet or {COMPRESSED} file"
            what = f"there is {kinds} named {path}" if is_pattern else f"folder {path} holds {kinds}"
            raise RecipeError.at(f"{key}.path", what)
        return files
    if path.name.endswith(SUFFIXES):
        if not path.exists():
            reason = f"file {path} does not exist (looked for from {Path.cwd()})"
            raise RecipeError.at(f"{key}.path", reason + how_to_make(path))
        return [path]
    if path.exists():
        raise RecipeError.at(f"{key}.path", f"{path} must end in .jsonl, .parquet or {COMPRESSED}")
    return None
