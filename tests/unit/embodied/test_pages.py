"""The pages of simulators say what the code says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.libero_tasks import SETTLING_STEPS
from leaderless.embodied.simulators.registry import ADAPTERS, find_body

sys.path.append(str(Path(__file__).resolve().parents[3] / "docs"))  # as when it is run
from generate_bodies import HALVES, halves_said
from generate_simulators import DOCS, simulator_pages

PAGES = simulator_pages()


def test_each_adapter_has_a_page() -> None:
    assert PAGES.keys() == ADAPTERS.keys()


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_page_has_all_options_and_a_recipe_that_fits(name: str) -> None:
    page = PAGES[name]
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.S)[-1])
    assert recipe["body"]["type"] == name
    config = BodyConfig.model_validate(recipe["body"])
    kind = find_body(config)  # refuses options that it does not take
    code = kind.__init__.__code__  # type: ignore[misc]
    options = code.co_varnames[2 : code.co_argcount + code.co_kwonlyargcount]
    assert re.findall(r"^\| `(\w+)` \| ", page, re.M) == list(options)
    extras = set(re.findall(r"\.\[(\w+)\]'", page))
    declared = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert extras <= set(re.findall(r"^([\w-]+) = ", declared, re.M))
    assert extras or name == "isaaclab"


def test_the_page_of_libero_has_the_numbers_of_its_adapter() -> None:
    assert f"{SETTLING_STEPS} steps with the idle action" in PAGES["libero"]


def test_what_is_said_of_halves_is_computed() -> None:
    table = {
        "a": {"in the rank": 9, "lockstep, 1": 100, "halves, 1": 80, "lockstep, 2": 200, "halves, 2": 190},
        "b": {"in the rank": 9, "lockstep, 1": 100, "halves, 1": 110, "lockstep, 2": 200, "halves, 2": 200},
    }
    assert halves_said(table).endswith(
        "Of 4 comparisons, halves were slower in 2, by 5 to 20 %, and faster in 1, by 10 %."
    )
    assert halves_said({"a": {"lockstep, 1": 5, "halves, 1": 5}}).endswith("halves were as fast in all.")
    assert "slower in" in halves_said(json.loads(HALVES.read_text(encoding="utf-8")))
