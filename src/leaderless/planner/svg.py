"""Pieces of an SVG: style, text whose width is estimated, smooth lines."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float]

NAME_SIZE, TEXT_SIZE, CODE_SIZE = 14.0, 12.0, 11.0
"""Pixels of the font of names, of plain text and of code."""
NUM_COLORS = 6
"""Pools beyond these take the same colours again."""

# Every rule begins with the picture's own class, so that it does not reach the page that the picture stands in.
STYLE = """
.leaderless-plan{--paper:#fff;--ink:#1c2127;--soft:#57606a;--line:#8a939d;--moves:#c2410c;--weights:#7c3aed;
--pool-0:#2563eb;--pool-1:#0f8a5f;--pool-2:#be185d;--pool-3:#0e7490;--pool-4:#6b7a10;--pool-5:#475569}
@media (prefers-color-scheme:dark){.leaderless-plan{--paper:#14181d;--ink:#e8ecf0;--soft:#a0aab4;--line:#727c87;
--moves:#fb923c;--weights:#b79cff;--pool-0:#6aa2ff;--pool-1:#45c795;--pool-2:#f47fb4;--pool-3:#4cc3d9;--pool-4:#b9c94f;
--pool-5:#94a3b8}}
.leaderless-plan text{font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--soft)}
.leaderless-plan .name{font-size:14px;font-weight:600;fill:var(--ink)}
.leaderless-plan .code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:11px}
.leaderless-plan .paper{fill:var(--paper)}
.leaderless-plan .box rect{fill:var(--color);fill-opacity:.1;stroke:var(--color);stroke-width:1.5}
.leaderless-plan .box .paper{fill:var(--paper);fill-opacity:1;stroke:none}
.leaderless-plan .data{--color:var(--soft)}
.leaderless-plan .pruned rect{fill:none;stroke:var(--line);stroke-dasharray:3 4}
.leaderless-plan .pruned .name{fill:var(--soft);font-weight:400}
.leaderless-plan .loop rect{fill:none;stroke:var(--soft);stroke-width:1.5;stroke-dasharray:10 4 2 4}
.leaderless-plan .link path{fill:none;stroke:var(--color);stroke-width:1.5}
.leaderless-plan .link .reach{stroke:transparent;stroke-width:14}
.leaderless-plan .link .head{fill:var(--color);stroke:none}
.leaderless-plan .link rect{fill:var(--paper);fill-opacity:.88}
.leaderless-plan .link text{fill:var(--color)}
.leaderless-plan .local{--color:var(--line)}
.leaderless-plan .link.local text{fill:var(--soft)}
.leaderless-plan .order{--color:var(--line)}
.leaderless-plan .link.order .run{stroke-dasharray:1 5;stroke-linecap:round}
.leaderless-plan .reshard{--color:var(--moves)}
.leaderless-plan .link.reshard .run{stroke-width:3;stroke-dasharray:9 5}
.leaderless-plan .weights{--color:var(--weights)}
.leaderless-plan .link.weights .run{stroke-width:2;stroke-dasharray:2 4}
""" + "".join(f".leaderless-plan .pool-{i}{{--color:var(--pool-{i})}}\n" for i in range(NUM_COLORS))


def xml(text: str) -> str:
    """Text as XML.

    Args:
        text: Any; what XML cannot hold is replaced.
    """
    return escape(_legal(text))


def attribute(text: str) -> str:
    """Text as the value of an attribute, with its quotes.

    Args:
        text: Any; what XML cannot hold is replaced.
    """
    return quoteattr(_legal(text))


def _legal(text: str) -> str:
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def text_at(text: str, at: Point, style: str = "", anchor: str = "middle") -> str:
    """A line of text.

    Args:
        text: Escaped here.
        at: Its base line, at the middle or the start.
        style: `name`, `code` or plain.
        anchor: `middle` or `start`.
    """
    return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" class="{style}">{xml(text)}</text>'


def text_width(text: str, size: float) -> float:
    """About the pixels that a text takes, on the wide side: fonts differ from reader to reader.

    Args:
        text: One line.
        size: Of the font.
    """
    return sum(size if unicodedata.east_asian_width(letter) in "WF" else 0.6 * size for letter in text)


def clip(text: str, size: float, width: float) -> str:
    """A text that fits, with an ellipsis where it had to be cut.

    Args:
        text: One line.
        size: Of the font.
        width: In pixels.
    """
    if text_width(text, size) <= width:
        return text
    while text and text_width(text, size) > width - size:
        text = text[:-1]
    return text + "…"


def smooth_path(points: Sequence[Point]) -> str:
    """A smooth line that begins and ends upright and does not swing beyond its points.

    The slope at a point is the harmonic mean of the slopes to its neighbours, or none where they differ in sign
    (Fritsch and Carlson, Monotone Piecewise Cubic Interpolation, 1980).

    Args:
        points: All of different heights, from top to bottom or from bottom to top.
    """
    chords = [(x2 - x1) / (y2 - y1) for (x1, y1), (x2, y2) in pairwise(points)]
    slopes = [0.0, *(2 * a * b / (a + b) if a * b > 0 else 0.0 for a, b in pairwise(chords)), 0.0]
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for ((x1, y1), (x2, y2)), (slope1, slope2) in zip(pairwise(points), pairwise(slopes), strict=True):
        third = (y2 - y1) / 3
        parts.append(f"C{x1 + slope1 * third:.1f} {y1 + third:.1f} {x2 - slope2 * third:.1f} {y2 - third:.1f}")
        parts.append(f" {x2:.1f} {y2:.1f}")
    return "".join(parts)


def arrow_head(point: Point, *, is_downward: bool) -> str:
    """A triangle at the end of a line.

    Args:
        point: Its tip.
        is_downward: Where it points to.
    """
    x, y = point
    back = y - 9 if is_downward else y + 9
    return f'<path class="head" d="M{x:.1f} {y:.1f}L{x - 5:.1f} {back:.1f}H{x + 5:.1f}Z"/>'


def rounded_box(center: Point, width: float, height: float, style: str = "") -> str:
    """A rectangle with round corners.

    Args:
        center: Its middle.
        width: In pixels.
        height: In pixels.
        style: Class of its own.
    """
    x, y = center[0] - width / 2, center[1] - height / 2
    kind = f' class="{style}"' if style else ""
    return f'<rect{kind} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"/>'
