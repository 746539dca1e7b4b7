"""Writes the tables of settings of other frameworks into the guides of those who come from there."""

from __future__ import annotations

import re

from generate_markup import cell, table_of

from leaderless.convert.convert import TABLES, Framework
from leaderless.convert.table import Row

BEGIN, END = "<!-- settings, written by docs/generate.py -->", "<!-- end of settings -->"


def with_settings(page: str, framework: Framework) -> str:
    """A guide with the table of settings that `leaderless convert` uses."""
    rows = TABLES[framework]
    taken = table_of(
        (f"{framework}", "leaderless", "how"),
        [(f"`{row.theirs}`", _ours(row), cell(row.meaning)) for row in rows if row.ours],
    )
    needless = table_of(
        (f"{framework}", "why it is not needed"),
        [(f"`{row.theirs}`", cell(row.meaning)) for row in rows if not row.ours and row.is_needless],
    )
    left = table_of(
        (f"{framework}", "what to do"),
        [(f"`{row.theirs}`", cell(row.meaning)) for row in rows if not row.ours and not row.is_needless],
    )
    text = (
        f"{taken}\n\nThese have their effect without a setting:\n\n{needless}\n\nThese have no counterpart:\n\n{left}"
    )
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:begin]}\n\n{text}\n\n{page[end:]}"


def _ours(row: Row) -> str:
    """The keys of a recipe as code."""
    return ", ".join(f"`{part.removeprefix('or ')}`" for part in re.split(", ", row.ours))
