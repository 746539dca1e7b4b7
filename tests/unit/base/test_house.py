"""The structure of the source: which package imports which, and names that mean one thing."""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec

import pytest
from tests.arrows import PACKAGE, ROOMS, SOURCE, arrows, broken, may_import, section, sources
from tests.pages import ROOT

from leaderless.base.moved_modules import moved_modules
from leaderless.base.named_functions import load_callable
from leaderless.config import RecipeError

LIBRARIES = {
    "datasets",
    "gymnasium",
    "jinja2",
    "libero",
    "metaworld",
    "mlflow",
    "numpy",
    "openenv",
    "reasoning_gym",
    "sglang",
} | {*("tensorboard", "textarena", "torch", "trackio", "transformers", "verifiers", "vllm", "wandb")}


def modules() -> list[str]:
    """All modules of the source."""
    parts = (path.relative_to(SOURCE).with_suffix("").parts for path in sorted((SOURCE / PACKAGE).rglob("*.py")))
    return [".".join(part).removesuffix(".__init__") for part in parts]


def test_imports_run_down_only() -> None:
    assert broken() == []


def test_imports_in_functions_and_for_types_count() -> None:
    seen = {(arrow.module, arrow.imported) for arrow in arrows()}
    assert ("leaderless.cli.train", "leaderless.run.run.Run") in seen, "in a function"
    assert ("leaderless.algorithms.algorithm", "leaderless.algorithms.settings.AlgorithmConfig") in seen, "for types"
    assert not may_import("planner", "data")
    assert not may_import("run", "embodied")
    assert not may_import("embodied", "serving")
    assert may_import("cli", "serving")


def test_packages_are_those_of_the_table() -> None:
    folders = {path.relative_to(SOURCE / PACKAGE).parts[0] for path in (SOURCE / PACKAGE).glob("*/**/*.py")}
    assert folders == set(ROOMS)
    assert len(ROOMS) <= 18


def test_the_page_shows_the_table() -> None:
    assert section() in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_no_public_class_name_exists_twice() -> None:
    owners = defaultdict(list)
    for source in sources():
        for name in source.classes:
            owners[name].append(str(source.path.relative_to(SOURCE)))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_no_module_has_the_name_of_a_library() -> None:
    taken = sys.stdlib_module_names | LIBRARIES
    assert [name for name in modules() if "." in name and name.rpartition(".")[2] in taken] == []


def test_modules_of_earlier_versions_name_the_new_ones() -> None:
    known = set(modules())
    packages = {name.rpartition(".")[0] for name in known}
    for earlier, new in moved_modules().items():
        assert earlier not in known | packages
        assert new in known or find_spec(new) is not None, f"{earlier} is said to be {new}, which there is not"
    with pytest.raises(
        ModuleNotFoundError, match=r"'leaderless\.worker\.place' is now 'leaderless\.worker\.rank_info'"
    ):
        import_module("leaderless.worker.place")


def test_a_recipe_with_an_earlier_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(RecipeError, match=r"is now 'leaderless\.embodied\.policies'"):
        load_callable("leaderless.policies.mlp:Mlp", "models.policy.path", "class")
