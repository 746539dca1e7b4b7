"""What can be seen of a recipe's files in a moment, before anything is loaded. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.config.packaged_files import how_to_make
from leaderless.data.sources.files import find_files
from leaderless.data.sources.row_sources import read_lines

TOKENIZERS = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Names of the files of tokenizers."""


def problem_of_model(name: str, *, needs_tokenizer: bool) -> str:
    """Why a path cannot be a model's; empty if it can be, as where the name is one on the hub."""
    path = Path(name)
    if path.is_file():
        return f"{path} is a file, and no GGUF file; name the folder that holds config.json"
    if not path.exists():
        is_local = path.is_absolute() or name.startswith(".") or len(path.parts) > 2
        return f"folder {path} does not exist (looked for from {Path.cwd()}){how_to_make(path)}" if is_local else ""
    if not (path / "config.json").exists():
        packed = next(path.glob("*.gguf"), None)
        remedy = f": name {packed}" if packed else ""
        return f"folder {path} holds no config.json, so it is not a model{remedy}"
    if needs_tokenizer and not any(next(path.glob(pattern), None) for pattern in TOKENIZERS):
        return f"folder {path} holds no tokenizer, as tokenizer.json: copy its files there"
    cut = next((file for file in sorted(path.glob("*.safetensors")) if _is_cut(file)), None)
    return f"{cut} ends before its last weight: download or copy it again" if cut else ""


def _is_cut(file: Path) -> bool:
    """Whether the end of a safetensors file is missing."""
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        try:
            header = json.loads(content.read(min(size, file.stat().st_size)))
        except ValueError:
            return True
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return file.stat().st_size < 8 + size + max(ends, default=0)


def check_rows(config: DatasetConfig, key: str) -> None:
    """Refuse a dataset of files that are not there, or that have no row; one on the hub is not looked for."""
    files = find_files(config, key)
    if files is not None and not any(map(_has_rows, files)):
        raise RecipeError.at(f"{key}.path", f"{config.path} has no rows")


def _has_rows(file: Path) -> bool:
    if file.suffix != ".parquet":
        return next(read_lines(file, None), None) is not None
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return bool(parquet.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError):
        return True  # a worker says what is wrong with it
