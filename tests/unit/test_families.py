"""Every family of language models is computed right, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from tests.tiny_families import FILE, judge_family
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TABLE = json.loads(FILE.read_text(encoding="utf-8"))
QUICK = {
    "biogpt",  # dropout of functions
    "bloom",  # attention of its own
    "deepseek_v3",  # values that are narrower than keys
    "gemma3_text",  # layers of several types
    "mistral",  # a window
    "opt",  # layers that are skipped
    "stablelm",
}
"""Families that `make test` tries, one of each kind; test_models.py tries some more."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in TABLE["families"]],
)
def test_scores_and_gradients_are_those_of_the_family_or_it_is_refused(tmp_path: Path, family: str) -> None:
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    usual, neutral = judge_family(family, tmp_path)
    if transformers.__version__ != TABLE["transformers"]:
        return  # what is accepted is right there too, but other families or settings may be accepted
    listed = TABLE["families"][family]
    assert usual.is_right == ("refused" not in listed), usual.reason
    assert (neutral is not None and neutral.is_right) == ("otherwise" in listed), neutral


def test_every_family_is_listed() -> None:
    if Version(transformers.__version__) > Version(TABLE["transformers"]):
        pytest.skip("run python -m tests.tiny_families to try the families of a newer transformers")
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(TABLE["families"])
