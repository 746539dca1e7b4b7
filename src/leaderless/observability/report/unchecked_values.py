"""Values from files that may hold anything: a crash may have cut them, and a model wrote the texts in them."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element, ParseError, fromstring


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


DRAWING = "path rect circle ellipse line polyline polygon text tspan use linearGradient radialGradient"
STRUCTURE = "svg g defs title desc style marker clipPath mask pattern stop"
KNOWN = frozenset(f"{DRAWING} {STRUCTURE}".split())
"""Elements that are kept; scripts, links, images, foreign content and animations are not."""


def clean_svg(text: str) -> str:
    """An SVG file reduced to elements and attributes that only draw; a ValueError if it is not one."""
    try:
        # This parser loads nothing, and limits the size that entities grow to.
        root = fromstring(text)  # noqa: S314
        cleaned = _copy(root)
    except (ParseError, RecursionError):
        cleaned = ""
    if not cleaned.startswith("<svg"):
        raise ValueError("holds no complete <svg>")
    return cleaned


def _copy(element: Element) -> str:
    tag = element.tag.rpartition("}")[2]
    if tag not in KNOWN:
        return ""
    attributes = "".join(f' {key}="{html.escape(value)}"' for key, value in element.items() if _is_safe(key, value))
    if tag == "style":
        css = "".join(element.itertext())
        content = "" if _loads(css) else html.escape(css, quote=False)
    else:
        parts = (_copy(child) + html.escape(child.tail or "", quote=False) for child in element)
        content = html.escape(element.text or "", quote=False) + "".join(parts)
    return f"<{tag}{attributes}>{content}</{tag}>"


def _is_safe(key: str, value: str) -> bool:
    key = key.lower()
    if key.startswith("on") or not key.replace("-", "").isalnum():
        return False
    return value.startswith("#") if key == "href" else key not in {"src", "srcdoc"} and not _loads(value)


def _loads(css: str) -> bool:
    """Whether a style refers to anything outside the page."""
    compact = "".join(css.lower().split())
    references = compact.split("url(")[1:]
    return "@import" in compact or "\\" in compact or any(not part.lstrip("'\"").startswith("#") for part in references)
