"""A model in pieces that travel one by one: cut here, checked on arrival in any order, and joined when all are there.

Each piece begins with a line of JSON that describes the whole: its files, and the checksums of all pieces. So any piece
may come first, and none needs another one to be checked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

FORMAT = "leaderless-model-pieces-1"
SUFFIX = ".piece"
LARGEST_PIECE = 40 << 20
"""Most bytes of a piece, with its first line."""
LARGEST_LINE = 1 << 18
"""Most bytes of the first line."""
BLOCK = 1 << 22


@dataclass(frozen=True)
class Whole:
    """What all pieces of a model say of it.

    Attributes:
        model: Name of the model's folder or file.
        is_folder: Whether it is a folder.
        files: Path within the folder, bytes and checksum of each file, in the order of their contents.
        checksums: Checksum of the content of each piece.
    """

    model: str
    is_folder: bool
    files: tuple[tuple[str, int, str], ...]
    checksums: tuple[str, ...]

    @classmethod
    def read(cls, line: bytes) -> tuple[Whole, int]:
        """The whole, and the number of the piece that begins with a line.

        Raises:
            ValueError: The line is not the beginning of a piece.
        """
        try:
            values = json.loads(line)
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r} and not {FORMAT!r}")
            files = tuple((str(name), int(size), str(checksum)) for name, size, checksum in values["files"])
            whole = cls(str(values["model"]), bool(values["is_folder"]), files, tuple(map(str, values["checksums"])))
            number = int(values["number"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its first line does not describe a piece ({error})") from error
        names = [whole.model, *(part for name, _, _ in whole.files for part in PurePosixPath(name).parts)]
        if any(name in {"", ".", ".."} or "/" in name or "\\" in name for name in names):
            raise ValueError("it names files outside of the folder of the model")
        if not 1 <= number <= len(whole.checksums):
            raise ValueError(f"it is number {number} of {len(whole.checksums)}")
        return whole, number

    def line(self, number: int) -> bytes:
        """The first line of a piece."""
        return json.dumps({"format": FORMAT, "number": number, **asdict(self)}).encode() + b"\n"

    def name_of(self, number: int) -> str:
        """The name of the file of a piece."""
        return f"{self.model}-{number:03d}-of-{len(self.checksums):03d}{SUFFIX}"


class Arrival(NamedTuple):
    """What is known of a model after pieces have arrived.

    Attributes:
        model: Folder or file of the model; it is there if nothing is missing.
        missing: Numbers of the pieces that are missing.
        total: Number of all pieces.
    """

    model: Path
    missing: list[int]
    total: int


def split(model: Path, folder: Path, largest: int = LARGEST_PIECE) -> list[Path]:
    """Cut a model's folder or file into pieces.

    Args:
        model: Folder, or file.
        folder: Folder for the pieces.
        largest: Most bytes of a piece.

    Raises:
        ValueError: There is no such model, or pieces would be too small to hold their first line.
    """
    paths = sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else [model]
    if not paths or not paths[0].exists():
        raise ValueError(f"{model} holds no file: name the folder of a model, or a GGUF file")
    room = largest - LARGEST_LINE if largest > 2 * LARGEST_LINE else largest // 2
    checksums = tuple(hashlib.sha256(content).hexdigest() for content in _contents(paths, room))
    names = [path.relative_to(model).as_posix() for path in paths] if model.is_dir() else [model.name]
    files = [(name, path.stat().st_size, checksum_of(path)) for name, path in zip(names, paths, strict=True)]
    whole = Whole(model.resolve().name, model.is_dir(), tuple(files), checksums)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for number, content in enumerate(_contents(paths, room), 1):
        line = whole.line(number)
        if len(line) + len(content) > largest:
            raise ValueError(
                f"pieces of {largest} bytes are too small for {len(checksums)} checksums: make them larger"
            )
        pieces.append(folder / whole.name_of(number))
        pieces[-1].write_bytes(line + content)
    return pieces


def checksum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _contents(paths: Sequence[Path], size: int) -> Iterator[bytes]:
    """The contents of files, one after the other, cut into parts of one size; an empty model has one empty part."""
    held, is_first = bytearray(), True
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(min(BLOCK, size - len(held))):
                held += block
                if len(held) == size:
                    yield bytes(held)
                    held, is_first = bytearray(), False
    if held or is_first:
        yield bytes(held)


def add(source: Path, folder: Path) -> tuple[list[Arrival], list[str]]:
    """Keep the pieces that have arrived, and join those of a model when all of them are there.

    Args:
        source: Piece, or folder of pieces.
        folder: Folder in which pieces are kept and models are joined.

    Returns:
        What is known of each model that pieces came of, and a problem for each piece that was refused.

    Raises:
        ValueError: There is no piece.
        RuntimeError: A model was joined wrongly, although each piece was right.
    """
    pieces = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else [source]
    if not pieces or not pieces[0].exists():
        raise ValueError(f"{source} holds no piece: cut the model with `split`, and name a piece or their folder")
    wholes: dict[str, Whole] = {}
    problems = []
    for piece in pieces:
        try:
            whole = _keep(piece, folder)
            wholes[whole.model] = whole
        except ValueError as error:
            problems.append(f"{piece.name}: {error}")
    return [_arrival(whole, folder) for whole in wholes.values()], problems


def _keep(piece: Path, folder: Path) -> Whole:
    """Copy a piece next to the others of its model, if it is what its first line says."""
    with piece.open("rb") as file:
        whole, number = Whole.read(file.readline(LARGEST_LINE))
        kept, known = _kept(whole, folder), _known(whole, folder)
        if known is not None and known != whole:
            raise ValueError(f"{kept} is of another model of that name: remove that folder, or add to another one")
        if number in _missing(whole, folder):
            found = hashlib.sha256()
            kept.mkdir(parents=True, exist_ok=True)
            partial = kept / f"{number}.partial"
            with partial.open("wb") as copy:
                copy.write(whole.line(number))
                while block := file.read(BLOCK):
                    found.update(block)
                    copy.write(block)
            if found.hexdigest() != whole.checksums[number - 1]:
                partial.unlink()
                raise ValueError(f"piece {number} of {len(whole.checksums)} is damaged: bring it again")
            partial.rename(kept / whole.name_of(number))
    return whole


def _kept(whole: Whole, folder: Path) -> Path:
    return folder / f"{whole.model}.pieces"


def _known(whole: Whole, folder: Path) -> Whole | None:
    """What earlier pieces of a model of that name say of it; None without any."""
    kept = _kept(whole, folder)
    for path in (kept / "whole.json", *sorted(kept.glob(f"*{SUFFIX}"))):
        if path.exists():
            with path.open("rb") as file:
                return Whole.read(file.readline(LARGEST_LINE))[0]
    return None


def _missing(whole: Whole, folder: Path) -> list[int]:
    if (_kept(whole, folder) / "whole.json").exists():  # they were joined
        return []
    numbers = range(1, len(whole.checksums) + 1)
    return [number for number in numbers if not (_kept(whole, folder) / whole.name_of(number)).exists()]


def _arrival(whole: Whole, folder: Path) -> Arrival:
    """The state of a model, which is joined if all is there; its pieces are removed then."""
    kept, missing, model = _kept(whole, folder), _missing(whole, folder), folder / whole.model
    if not missing and not (kept / "whole.json").exists():
        partial = folder / f"{whole.model}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _join(whole, kept, partial)
        if model.exists():
            raise RuntimeError(f"{model} is there already, from elsewhere: move it away, and add a piece again")
        (partial if whole.is_folder else partial / whole.files[0][0]).rename(model)
        (kept / "whole.json").write_bytes(whole.line(1))
        shutil.rmtree(partial, ignore_errors=True)
        for piece in kept.glob(f"*{SUFFIX}"):
            piece.unlink()
    return Arrival(model, missing, len(whole.checksums))


def _join(whole: Whole, kept: Path, partial: Path) -> None:
    """Write the files of a model from its pieces, and compare their checksums."""
    contents = _kept_contents(whole, kept)
    held = b""
    for name, size, checksum in whole.files:
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            left = size
            while left:
                held = held or next(contents)
                file.write(held[:left])
                left, held = left - min(left, len(held)), held[left:]
        if checksum_of(path) != checksum:
            raise RuntimeError(f"{path} is not what was cut: remove {kept} and bring all pieces again")


def _kept_contents(whole: Whole, kept: Path) -> Iterator[bytes]:
    for number in range(1, len(whole.checksums) + 1):
        with (kept / whole.name_of(number)).open("rb") as file:
            file.readline(LARGEST_LINE)
            yield from _blocks(file)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block
