"""Values from files that may hold anything: a crash may have cut them, and a model wrote the texts in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence


def parse_json(text: str) -> object:
    """Parse JSON; a ValueError if the text is something else, or is nested too deeply."""
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    return value


def parse_json_lines(text: str, name: str, notes: list[str]) -> list[Mapping[str, object]]:
    """The objects in the text of the JSONL file of this name; a note counts the lines that are not objects.

    A broken last line is not counted: a run that is killed while it writes leaves one behind.
    """
    rows: list[Mapping[str, object]] = []
    num_broken = 0
    # JSON strings may hold line separators that str.splitlines would split at.
    lines = [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            num_broken += 1
    if num_broken:
        notes.append(f"{name}: skipped lines that are not JSON objects: {num_broken}.")
    return rows


def embedded_json(value: object) -> str:
    """Compact JSON without any character that means something to an HTML parser; numbers must be finite."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is a JSON object, else an empty object."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> Sequence[object]:
    """The value if it is a JSON array, else an empty array."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str:
    """The value if it is a string, no text if it is null, else its JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def as_number(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_step(value: object) -> int | None:
    """The value if it is a whole number, else None."""
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() and not isinstance(value, bool) else None
