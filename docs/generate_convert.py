"""Writes the tables of settings of other frameworks into the guides of those who come from there."""

from __future__ import annotations

import re
from dataclasses import replace

from generate_markup import cell, table_of

from leaderless.cli.convert_config.convert import TABLES, Framework
from leaderless.cli.convert_config.table import Row
from leaderless.cli.convert_config.trl_preferences import TABLES as PREFERENCES
from leaderless.cli.convert_config.verl_names import OTHER_NAMES

FRAMEWORKS: tuple[Framework, ...] = ("verl", "trl")
"""Frameworks with a guide."""
BEGIN, END = "<!-- settings, written by docs/generate.py -->", "<!-- end of settings -->"
BEGIN_PREFERENCES = "<!-- settings of preferences, written by docs/generate.py -->"


def with_settings(page: str, framework: Framework) -> str:
    """A guide with the table of settings that `leaderless convert` uses."""
    rows = TABLES[framework]
    taken = table_of(
        (f"{framework}", "leaderless", "how"),
        [(_theirs(row), _ours(row), cell(row.meaning)) for row in rows if row.ours],
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
    page = _filled(page, BEGIN, text)
    return _filled(page, BEGIN_PREFERENCES, _preferences()) if framework == "trl" else page


def _filled(page: str, mark: str, text: str) -> str:
    begin = page.index(mark) + len(mark)
    return f"{page[:begin]}\n\n{text}\n\n{page[page.index(END, begin) :]}"


def _preferences() -> str:
    """The keys of DPO, KTO and reward models that are others than GRPO's, or mean something else."""
    known = {_said(row) for row in TABLES["trl"]}
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, rows in PREFERENCES.items():
        for row in rows:
            if _said(row) not in known:
                found.setdefault(_said(row), []).append(name.removeprefix("trl-"))
    order = list(dict.fromkeys(key[0] for key in found))
    return table_of(
        ("trl", "of", "leaderless", "how"),
        [
            (f"`{theirs}`", ", ".join(names), ours, how)
            for (theirs, ours, how), names in sorted(found.items(), key=lambda item: order.index(item[0][0]))
        ],
    )


def _said(row: Row) -> tuple[str, str, str]:
    """What a guide says about a row; what holds for a reward model is said as for a policy."""
    row = replace(row, ours=row.ours.replace("models.reward_model.", "models.policy."))
    return row.theirs, _ours(row) if row.ours else ("not needed" if row.is_needless else "none"), cell(row.meaning)


def _theirs(row: Row) -> str:
    """The names of a key in one release and another as code."""
    names = [row.theirs, *(name for name, older in OTHER_NAMES.items() if older == row.theirs)]
    return ", ".join(f"`{name}`" for name in names)


def _ours(row: Row) -> str:
    """The keys of a recipe as code."""
    return ", ".join(f"`{part.removeprefix('or ')}`" for part in re.split(", ", row.ours))
