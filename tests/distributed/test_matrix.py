"""The table of features and layouts: what several ranks learn is what one does, wherever it is not refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.distributed.test_training import largest_difference
from tests.end_to_end.cli import ROOT
from tests.matrix import LAYOUTS, Feature, cell, learned, rows
from tests.tiny import tiny_model, untied_model

PAGES = [ROOT / "docs/reference" / name for name in ("combinations.md", "combinations.zh.md")]


def table_of(page: Path) -> list[list[str]]:
    """The table of a page behind the command that prints it: layouts, and the name and the cells of each feature."""
    lines = page.read_text(encoding="utf-8").partition("`python -m tests.matrix`")[2].split("\n\n")[1].splitlines()
    header, _, *others = ([text.strip() for text in line.strip("|").split(" | ")] for line in lines)
    in_english = str.maketrans({"，": ", ", "（": " (", "环": "ring", "）": ")"})
    return [[layout.translate(in_english) for layout in header[1:]], *others]


def test_pages_have_the_same_cells_for_all_layouts() -> None:
    tables = [table_of(page) for page in PAGES]
    for layouts, *features in tables:
        assert layouts == [*LAYOUTS]
        assert {len(cells) for _, *cells in features} == {len(LAYOUTS)}
    first, second = ([cells for _, *cells in features] for _, *features in tables)
    assert first == second
    assert all(cell == "–" or float(cell) < 1e-5 for cells in first for cell in cells)


@pytest.mark.parametrize("layout", ["`dp` 2", "`tp` 2", "`cp` 3 (ring)", "`cp` 2, `tp` 2", "`pp` 2"])
def test_ranks_score_and_learn_over_what_could_be_drawn_like_one(ranks: RankPool, layout: str) -> None:
    feature = Feature(untied_model(tiny_model("qwen3")), is_truncated=True)
    (expected,), (other,) = (
        learned(ranks, one, 1, {"dp": 1}) for one in (feature, replace(feature, is_truncated=False))
    )
    assert not isinstance(expected, str)
    assert not isinstance(other, str)
    assert largest_difference([other], expected) > 0.01, "it matters"
    difference = cell(ranks, feature, LAYOUTS[layout], expected)
    assert isinstance(difference, float)
    assert difference < 1e-5


@pytest.mark.thorough
def test_features_learn_on_every_layout_what_they_learn_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    _, *known = table_of(PAGES[0])
    found = dict(rows(ranks, tmp_path))
    assert [*found] == [name for name, *_ in known]
    wrong = [
        f"{name}, {layout}: {value} ({cell} on the page)"
        for name, *cells in known
        for layout, cell, value in zip(LAYOUTS, cells, found[name], strict=True)
        if (value is None) != (cell == "–") or isinstance(value, str) or (value or 0) >= 1e-5
    ]
    assert not wrong, "\n".join(wrong)
