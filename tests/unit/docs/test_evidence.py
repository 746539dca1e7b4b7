"""What README and the page about evidence say has been run is what their data file has."""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs"))  # as when it is run

from generate_evidence import Feature, load_evidence  # noqa: E402

FEATURES = [feature for subject in load_evidence() for feature in subject.features]
GIVEN = {"name": "a", "name_zh": "a", "page": "index.md"}
RUN = {"command": "make test", "commit": "0123abcd", "date": "2026-01-31", "figure": "1 s", "figure_zh": "1 s"}


def rows_of(page: Path) -> list[list[str]]:
    """The cells of the rows of all tables of a page."""
    lines = re.findall(r"^\| (.*) \|$", page.read_text(encoding="utf-8"), re.M)
    return [re.split(r"(?<!\\) \| ", line) for line in lines]


@pytest.mark.parametrize("language", ["", ".zh"])
def test_the_page_has_every_feature_with_level_command_commit_date_and_figure(language: str) -> None:
    rows = {(row[0], row[1]): row[2:] for row in rows_of(ROOT / f"docs/evidence{language}.md") if len(row) == 6}
    for one in FEATURES:
        name, figure = (one.name, one.figure) if not language else (one.name_zh, one.figure_zh)
        command, commit, date, outcome = rows.pop((f"[{name}]({one.page})", str(one.level)))
        assert (command.strip("`"), commit.strip("`"), date) == (one.command, one.commit, str(one.date or ""))
        assert outcome.startswith(figure or "*")
    assert {len(names) for names in rows} <= {2}
    assert not [names for names in rows if names[0].startswith("[")], "a feature that the file does not have"


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_readme_counts_the_features_of_each_level(readme: str) -> None:
    counted: Counter[int] = Counter()
    for row in rows_of(ROOT / readme):
        if "/evidence" in row[0]:
            counted.update({level: int(cell or 0) for level, cell in enumerate(row[1:6])})
    assert +counted == Counter(one.level for one in FEATURES)


@pytest.mark.parametrize("lacking", sorted(RUN.keys() - {"figure_zh"}))
def test_a_level_that_a_run_must_show_needs_all_of_it(lacking: str) -> None:
    assert Feature.model_validate(GIVEN | RUN | {"level": 2}).level == 2
    rest = {name: value for name, value in RUN.items() if not name.startswith(lacking)}
    with pytest.raises(ValidationError, match=f"has level 2, which needs {lacking}"):
        Feature.model_validate(GIVEN | rest | {"level": 2})


def test_a_feature_without_a_figure_says_what_is_missing() -> None:
    with pytest.raises(ValidationError, match="say what is missing"):
        Feature.model_validate(GIVEN | {"level": 0})


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.command], ids=lambda one: one.name)
def test_commands_name_what_exists(feature: Feature) -> None:
    program, *words = feature.command.split()
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    elif words[:1] == ["-m"]:
        assert find_spec(words[1]) is not None
    else:
        assert program in {"python", "pytest", "leaderless"}
        assert any((ROOT / word).is_file() for word in words)


def test_the_file_names_a_page_for_each_feature_and_no_feature_twice() -> None:
    assert all((ROOT / "docs" / one.page).is_file() for one in FEATURES)
    assert len({one.name for one in FEATURES}) == len(FEATURES) > 30
    assert yaml.safe_load((ROOT / "docs/evidence.yaml").read_text(encoding="utf-8"))
