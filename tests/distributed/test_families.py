"""Families whose layers differ from most: ranks that divide them, and what is exported of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.distributed.test_context_parallel import train
from tests.distributed.test_training import largest_difference
from tests.divided_families import RIGHT, export
from tests.tiny_families import tiny_config, write_family

EXPERTS = {"zero_expert_num": 64}
"""Almost all tokens go through experts that compute nothing, and many passes through no others."""


@pytest.mark.parametrize(
    ("family", "settings", "sizes"),
    [
        ("longcat_flash", EXPERTS, {"dp": 2}),
        ("longcat_flash", EXPERTS, {"dp": 1, "cp": 2}),
        ("gemma4_unified_text", {}, {"dp": 1, "cp": 2}),  # layers have other numbers of key heads
        ("mamba", {}, {"dp": 2}),  # its layers have parts that `transformers` names next to them
    ],
    ids=str,
)
def test_ranks_that_divide_a_family_compute_what_one_rank_does(
    ranks: RankPool, tmp_path: Path, family: str, settings: dict[str, object], sizes: dict[str, int]
) -> None:
    write_family(tiny_config(family, **settings), tmp_path)
    (expected,) = ranks.once(1, train, str(tmp_path), {"dp": 1}, 64, {})
    found = ranks.run(2, train, str(tmp_path), sizes, 64, {})
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("deepseek_v3", {"dp": 2}),  # biases of routers, which training does not change
        ("deepseek_v3", {"dp": 1, "pp": 2}),  # these are on the second stage
        ("emu3", {"dp": 2}),  # not known by its text part
        ("gemma3_text", {"dp": 2}),  # words that are tied
    ],
    ids=str,
)
def test_what_is_exported_of_a_trained_model_computes_what_the_trainer_does(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    write_family(tiny_config(family), tmp_path)
    assert export(ranks, str(tmp_path), sizes) == RIGHT
