"""Advantages, losses and penalties are those of verl, as `benchmarks/formulas_verl.py` has stored them."""

from __future__ import annotations

import json

import pytest
from benchmarks.formulas_verl import STORED, Rows, ours, probe

MEASURED = json.loads(STORED.read_text(encoding="utf-8"))["formulas"]


def test_formulas_are_those_of_verl() -> None:
    found = ours(Rows.make())
    assert found.keys() == MEASURED.keys()
    for name, one in MEASURED.items():
        assert probe(found[name]) == pytest.approx(one["verl"], abs=1e-5), name
        assert one["difference"] < 1e-5, name


def test_ratios_are_on_both_sides_of_every_bound() -> None:
    rows = Rows.make()
    ratios = rows.packed((rows.log_probs - rows.old_log_probs).exp())
    is_negative = rows.packed(rows.advantages) < 0
    for bound in (0.7, 0.8, 1.28, 1.4, 3.0):
        assert (ratios[is_negative] > bound).any()
        assert (ratios[is_negative] < bound).any()
