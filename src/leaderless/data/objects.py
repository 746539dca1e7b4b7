"""What an object column may hold: values that are the same behind a journey through JSON as before it."""

from __future__ import annotations

_PLAIN = frozenset({type(None), bool, int, float, str})


def what_changes(value: object) -> str:
    """What of a value would be something else after it has travelled to another rank.

    Args:
        value: Of an object column.

    Returns:
        As `tuple (1, 2)`; empty when all of it is plain.
    """
    try:
        return _what_changes(value)
    except RecursionError:
        return f"{type(value).__name__} that is nested too deeply"


def _what_changes(value: object) -> str:
    kind = type(value)  # exactly: NumPy's float64 is a float too, and would arrive as another
    if kind in _PLAIN:
        return ""
    if isinstance(value, list) and kind is list:
        return next((found for item in value if (found := _what_changes(item))), "")
    if isinstance(value, dict) and kind is dict:
        for key in value:
            if type(key) is not str:
                return f"key {_short(key)} of a dict"
        return next((found for item in value.values() if (found := _what_changes(item))), "")
    return f"{kind.__name__} {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
