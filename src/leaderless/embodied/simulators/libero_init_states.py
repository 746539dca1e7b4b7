"""The start states of LIBERO's tasks, which come as pickles, read without executing what is in them."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override


def _array(_kind: object, _shape: object, _type: object) -> _Array:
    return _Array()


class _Array:
    """Fields that a pickle fills to make an array."""

    def __init__(self) -> None:
        self.values: NDArray[np.generic] = np.zeros(0)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array of something else than numbers")
        flat = np.frombuffer(content, np.dtype(dtype.order + dtype.name))
        self.values = flat.reshape(cast("tuple[int, ...]", shape), order="F" if is_fortran else "C").copy()


class _Type:
    """The type of an array's numbers."""

    def __init__(self, name: str, *_: object) -> None:
        if name not in {"f4", "f8", "i4", "i8"}:
            raise pickle.UnpicklingError(f"an array of '{name}', not of numbers")
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple[object, ...]) -> None:
        if state[1] not in {"<", ">", "|", "="}:
            raise pickle.UnpicklingError(f"a type with the byte order {state[1]!r}")
        self.order = str(state[1])


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding '{encoding}'")
    return text.encode("latin1")


_KNOWN: Mapping[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}
"""All that a pickle may name; nothing of it runs code of other packages."""


class _Reader(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it wants to use {module}.{name}")
        return _KNOWN[module, name]

    @override
    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to a tensor of torch")


def read_states(path: Path) -> NDArray[np.float64]:
    """States [number of starts, size] of a file of LIBERO (`.pruned_init`, `.init`), or of its conversion (`.npy`).

    Raises:
        ValueError: The file holds something else than an array of numbers.
    """
    try:
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        else:
            with zipfile.ZipFile(path) as archive:
                name = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
                content = _Reader(io.BytesIO(archive.read(name))).load()
            if not isinstance(content, _Array):
                raise pickle.UnpicklingError(f"a {type(content).__name__} in place of an array")
            found = content.values
        states = np.array(found, np.float64)
        if states.ndim != 2 or not np.isfinite(states).all():
            raise ValueError(f"an array {states.shape} in place of finite rows")
    except (pickle.UnpicklingError, zipfile.BadZipFile, StopIteration, ValueError, EOFError, IndexError) as error:
        raise ValueError(f"'{path}' does not hold start states of LIBERO ({error}): get the file again") from error
    return states


def starts_of(folder: Path, suite: str, task: str) -> NDArray[np.float64]:
    """Start states of a task; they are converted once, and written next to LIBERO's file if that is allowed.

    Args:
        folder: LIBERO's folder `init_files`.
        suite: Name of the suite, such as `libero_spatial`.
        task: Name of the task, as its file is named.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds something else.
    """
    converted = folder / suite / f"{task}.npy"
    if converted.exists():
        return read_states(converted)
    original = converted.with_suffix(".pruned_init")
    if not original.exists():
        raise FileNotFoundError(f"there is no '{original}': copy LIBERO's folder init_files there")
    states = read_states(original)
    partial = converted.with_suffix(".partial.npy")
    try:
        np.save(partial, states, allow_pickle=False)
        partial.replace(converted)
    except OSError:  # a folder that may not be written to is converted again each time
        partial.unlink(missing_ok=True)
    return states
