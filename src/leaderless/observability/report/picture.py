"""The plan's picture, made safe to stand inside the page."""

from __future__ import annotations

import html
from html.parser import HTMLParser

SHAPES = frozenset(("path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan", "use"))
"""Elements that draw."""
STRUCTURE = frozenset(("svg", "g", "defs", "title", "desc", "style", "marker", "clippath", "mask", "pattern", "stop"))
"""Elements that hold others or explain; scripts, links, images, foreign content and animations are left out."""
GRADIENTS = frozenset(("lineargradient", "radialgradient"))
"""Elements that fill."""


class _Cleaner(HTMLParser):
    """Copies the first SVG of a text, known elements only.

    Names come in lower case from the parser; a browser gives SVG names their case back.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._open: list[str] = []
        self._skipped: list[str] = []
        self.is_complete = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Copy a known element, or begin to leave one out."""
        if self.is_complete or (not self._open and tag != "svg"):
            return
        if self._skipped or tag not in SHAPES | STRUCTURE | GRADIENTS:
            self._skipped.append(tag)
            return
        self._open.append(tag)
        written = "".join(f' {key}="{html.escape(value or "")}"' for key, value in attrs if _is_safe(key, value or ""))
        self.parts.append(f"<{tag}{written}>")

    def handle_endtag(self, tag: str) -> None:
        """Close a copied element, or end what is left out."""
        if self._skipped:
            if tag in self._skipped:
                del self._skipped[self._skipped.index(tag) :]
            return
        if self._open and tag == self._open[-1]:
            self.parts.append(f"</{self._open.pop()}>")
            self.is_complete = not self._open

    def handle_data(self, data: str) -> None:
        """Copy text; a style sheet only if it loads nothing."""
        if not self._open or self._skipped:
            return
        if self._open[-1] == "style":
            data = html.unescape(data)  # HTML reads a style sheet raw, XML and SVG do not
            if _loads(data):
                return
        self.parts.append(html.escape(data, quote=False))


def clean_svg(text: str) -> str:
    """The SVG in a text, reduced to elements and attributes that only draw.

    Args:
        text: Contents of an SVG file.

    Raises:
        ValueError: There is no complete `<svg>` in it.
    """
    cleaner = _Cleaner()
    cleaner.feed(text)
    cleaner.close()
    if not cleaner.is_complete:
        raise ValueError("holds no complete <svg>")
    return "".join(cleaner.parts)


def _is_safe(key: str, value: str) -> bool:
    if key.startswith(("on", "xmlns")) or not key.replace("-", "").replace(":", "").isalnum():
        return False
    if key in {"href", "xlink:href"}:
        return value.startswith("#")
    return key not in {"src", "srcdoc"} and not _loads(value)


def _loads(css: str) -> bool:
    """Whether a style refers to anything outside the page."""
    compact = "".join(css.lower().split())
    references = compact.split("url(")[1:]
    return "@import" in compact or "\\" in compact or any(not part.lstrip("'\"").startswith("#") for part in references)
