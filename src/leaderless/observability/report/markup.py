"""HTML that is safe by default: text is escaped unless it was built here."""

from __future__ import annotations

import html
import json


class Html(str):
    """Text that is HTML already; every other string is escaped before it goes into the page."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str) -> Html:
    """An element.

    Args:
        name: Its tag.
        content: What is in it; a string that is not `Html` is escaped.
        attributes: Its attributes, escaped. A trailing underscore is dropped (`class_`), others become hyphens.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{join(*content)}</{name}>")


def join(*parts: str) -> Html:
    """Pieces of a page behind one another; a string that is not `Html` is escaped.

    Args:
        parts: The pieces.
    """
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def json_block(identifier: str, value: object) -> Html:
    """Data for the page's scripts, in a block that no text in it can close.

    Args:
        identifier: The block's `id`.
        value: JSON-able, without NaN or infinity.
    """
    return Html(f'<script type="application/json" id="{html.escape(identifier)}">{embedded_json(value)}</script>')


def embedded_json(value: object) -> str:
    """Compact JSON without a character that means something to an HTML parser.

    Args:
        value: JSON-able, without NaN or infinity.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def format_number(value: float) -> str:
    """A number for a reader, four digits of it.

    Args:
        value: Finite.
    """
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.2e}"


def format_bytes(value: float) -> str:
    """A size for a reader.

    Args:
        value: Bytes.
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if value < 10 and unit != "B" else f"{value:,.0f} {unit}"


def format_duration(seconds: float) -> str:
    """A time span for a reader.

    Args:
        seconds: At least 0.
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
