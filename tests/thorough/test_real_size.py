"""The whole life of a run with a model of a real size, and its memory compared with the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.real_size import make_model, measure

TOLERANCE = 0.15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "model"
    make_model(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_of_half_a_billion_parameters_needs_what_the_plan_says(
    tmp_path: Path, model: Path, workers: int
) -> None:
    phases = measure(tmp_path, model, workers)
    assert {"loading", "rollout", "log-probs", "update", "checkpoint", "resume"} <= phases.keys()
    assert workers > 1 or {"export", "serve"} <= phases.keys()
    ratios = {name: sizes["measured"] / sizes["planned"] for name, sizes in phases.items()}
    assert ratios == {name: pytest.approx(1, abs=TOLERANCE) for name in ratios}, phases
