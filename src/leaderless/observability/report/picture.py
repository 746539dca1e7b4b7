"""The plan's picture, made safe to stand inside the page."""

from __future__ import annotations

import html
from xml.etree.ElementTree import Element, ParseError, fromstring

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
