"""Plain values and arrays as bytes: JSON, and what JSON lacks as base64 within it. Nothing in them is executed."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping

import numpy as np

_MARK = "\0"
"""Key of what JSON has no form for."""


def pack(value: object) -> bytes:
    """A value as bytes.

    Args:
        value: Numbers, text, bytes, arrays, and lists, tuples and dictionaries of these.

    Raises:
        TypeError: There is something else in it.
    """
    return json.dumps(_written(value)).encode()


def unpack(packed: bytes) -> object:
    """A value that was packed."""
    return _read(json.loads(packed))


def is_plain(value: object) -> bool:
    """Whether a value can be packed."""
    try:
        _written(value)
    except TypeError:
        return False
    return True


def _written(value: object) -> object:
    if value is None or isinstance(value, bool | str) or type(value) in {int, float}:
        return value
    if isinstance(value, bytes):
        return {_MARK: "bytes", "bytes": b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        facts = {"dtype": array.dtype.str, "shape": list(array.shape)}
        return {_MARK: kind, **facts, "bytes": b64encode(array.tobytes()).decode()}
    if type(value) is tuple:
        return {_MARK: "tuple", "items": [_written(one) for one in value]}
    if type(value) is list:
        return [_written(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _written(one) for key, one in value.items()}
    raise TypeError(f"a {type(value).__name__} cannot be packed: only numbers, text, bytes, arrays, and lists of them")


def _read(value: object) -> object:
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: _read(one) for key, one in value.items()}
    if kind == "tuple":
        return tuple(_read(one) for one in value["items"])
    content = b64decode(value["bytes"])
    if kind == "bytes":
        return content
    array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]
