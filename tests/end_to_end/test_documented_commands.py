"""The commands of the documentation do what the pages say: all of them in the thorough form, quick ones always."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.documented import GIVEN, NOT_RUN, Reader, pages_with_commands, reason_for, shell_blocks
from tests.end_to_end.cli import run
from tests.pages import ROOT, blocks

MANY_RANKS = 50_000
"""Ranks with which a simulation takes long; the thorough form has them too."""
QUICK = {"plan", "schema", "submit", "simulate"}
"""Commands that take a second or less in a process that has imported everything, and need nothing but a recipe."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of a short quickstart, which many pages take for granted."""
    folder = tmp_path_factory.mktemp("quickstart") / "copy"
    done = Reader(ROOT / "docs/index.md", folder, None).follow()
    assert done.code == 0, done.output
    return folder / "runs"


@pytest.mark.thorough
@pytest.mark.parametrize("page", pages_with_commands(), ids=named)
def test_commands_of_a_page_run_in_order(page: Path, quickstart: Path, tmp_path: Path) -> None:
    done = Reader(page, tmp_path / "copy", quickstart).follow()
    assert done.code == 0, done.output[-5000:]


def quick_commands() -> list[tuple[str, list[str]]]:
    """Quick commands of all pages, once, with the place of each; a layout by measurements needs the command before."""
    found: dict[str, str] = {}
    for page in pages_with_commands():
        for place, lines in shell_blocks(page):
            for line in lines:
                if re.match(rf"leaderless ({'|'.join(QUICK)})\b(?! recipe\.yaml|.*--layout auto)", line):
                    found.setdefault(line, place)
    return [(place, shlex.split(line, comments=True)[1:]) for line, place in found.items()]


@pytest.mark.parametrize(("place", "words"), quick_commands(), ids=str)
def test_quick_commands_run(ranks: RankPool, tmp_path: Path, place: str, words: list[str]) -> None:
    for name in ("examples", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = words[: words.index(">")] if ">" in words else words
    if "--world-size" in words:
        at = words.index("--world-size") + 1
        words[at] = ",".join(size for size in words[at].split(",") if int(size) < MANY_RANKS)
    outcome = run(ranks, tmp_path, *words)
    assert outcome.code == 0, f"{place}: {outcome.errors}"


def test_what_is_not_executed_is_in_the_documentation_and_has_a_reason() -> None:
    lines = [line for block in blocks("shell") for line in block.text.splitlines()]
    for begin, reason in NOT_RUN.items():
        assert any(line.startswith(begin) for line in lines), f"no page has {begin!r}: remove it from NOT_RUN"
        assert len(reason) > 10
    assert reason_for("leaderless plan recipe.yaml") is None


def test_what_pages_take_for_granted_is_about_pages_with_commands() -> None:
    assert {*GIVEN} <= {named(page) for page in pages_with_commands()}
