"""The list of all algorithms, from their docstrings."""

from __future__ import annotations

import inspect
import runpy
from io import StringIO
from typing import get_args

import pytest
from rich.console import Console

from leaderless import algorithms
from leaderless.algorithms import Aggregation, CorrectionLevel, KlEstimator
from leaderless.algorithms.catalogue import CLASSES, FUNCTIONS, entries, show

PLUMBING = {
    "add_to_last",
    "count_groups",
    "count_groups_without_signal",
    "decayed_sum",
    "majority_is_correct",
    "pack",
    "pass_at_k",
    "repeat_per_token",
    "segment_mean",
    "segment_sum",
    "unpack",
}
"""Public functions that are not algorithms, or that measure instead of training."""

LISTED = {function.__name__: function for functions in FUNCTIONS.values() for function in functions}
TYPES = [(kind, name) for kind, classes in CLASSES.items() for name in classes]


def test_every_public_function_that_trains_is_listed() -> None:
    public = {name for name, value in vars(algorithms).items() if inspect.isfunction(value)}
    assert set(LISTED) == public - PLUMBING
    assert public >= PLUMBING


@pytest.mark.parametrize("name", LISTED)
def test_every_listed_function_names_its_source(name: str) -> None:
    assert "\n\nSource: " in inspect.getdoc(LISTED[name])


@pytest.mark.parametrize(("kind", "name"), TYPES)
def test_every_type_is_described_where_it_is_defined(kind: str, name: str) -> None:
    (entry,) = (entry for entry in entries() if (entry.kind, entry.name) == (kind, name))
    docstring = CLASSES[kind][name].__doc__ or ""
    assert f"Formula: {entry.formula}." in " ".join(docstring.split())
    assert f"Source: {entry.source}." in " ".join(docstring.split())


def test_every_entry_has_a_formula_and_a_source() -> None:
    found = list(entries())
    assert len({(entry.kind, entry.name) for entry in found}) == len(found)
    assert all(entry.formula and entry.source for entry in found)
    names = {entry.name for entry in found}
    assert names >= {f"kl_penalty: {name}" for name in get_args(KlEstimator)}
    assert names >= {f"token_weights: {name}" for name in get_args(Aggregation)}
    assert names >= {f"importance_ratios: {name}" for name in get_args(CorrectionLevel)}


@pytest.mark.parametrize(
    "docstring",
    ["No formula.\n\nSource: here.", "No source.\n\nFormula: x.", "Variants.\n\n- `a`: x\n\nSource: b.", None],
)
def test_a_docstring_that_lacks_something_is_refused(docstring: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> None: ...

    nameless.__doc__ = docstring
    monkeypatch.setattr("leaderless.algorithms.catalogue.FUNCTIONS", {"kind": (nameless,)})
    with pytest.raises(ValueError, match="docstring of nameless"):
        list(entries())


def test_a_terminal_gets_a_table_and_a_file_gets_lines() -> None:
    table, lines = StringIO(), StringIO()
    show(Console(file=table, force_terminal=True, width=200))
    show(Console(file=lines))
    assert "─" in table.getvalue()
    assert all(entry.name.split(": ")[-1] in table.getvalue() for entry in entries())
    rows = [line.split("\t") for line in lines.getvalue().splitlines()]
    assert rows == [[entry.kind, entry.name, entry.formula, entry.source] for entry in entries()]


def test_the_command_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("leaderless.algorithms", run_name="__main__")
    output = capsys.readouterr().out
    assert "advantage\tgrpo\t(r - mean) / (std + epsilon), or r - mean\tDeepSeekMath" in output
    assert "\x1b" not in output
