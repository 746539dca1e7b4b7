"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).parts,
)
BLOCK = re.compile(r"(?:<!-- from: (?P<source>\S+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    source: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m["language"], m["text"], m["source"])
        for m in BLOCK.finditer(text)
    ]


def blocks(*languages: str) -> list[Block]:
    """The code blocks of all pages, each text once: Chinese pages repeat those of English ones."""
    found: dict[tuple[str, str], Block] = {}
    for block in (block for page in PAGES for block in blocks_of(page) if block.language in languages):
        found.setdefault((block.language, block.text), block)
    return list(found.values())
