"""Arguments of a recipe for an engine outside of this package, from the recipe to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, run, succeed
from tests.engines import fake_sglang_python
from tests.tiny import tiny_model, write_recipe

from leaderless.config import RecipeError
from leaderless.config.rollout import RolloutConfig
from leaderless.run.standalone_model import find_model, open_model

KNOWN: Mapping[str, object] = {"max_prefill_tokens": 64, "disable_radix_cache": True}
WRONG = (
    r"rollout\.external\.arguments\.max_prefil_tokens: SGLang 0\.0\.fake has no argument of this name \(did you mean"
)


def rollout_with(folder: Path, arguments: Mapping[str, object]) -> dict[str, object]:
    return {"engine": "sglang", "external": {"python": fake_sglang_python(folder), "arguments": dict(arguments)}}


def test_a_run_gives_an_engine_its_arguments_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    external = rollout_with(tmp_path, KNOWN)["external"]
    changes = {"rollout.engine": "sglang", "rollout.external": external, "steps": 1}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), changes)
    said = succeed(ranks, tmp_path, "train", recipe)
    assert (
        "SGLang 0.0.fake generates with role 'policy' and the arguments max_prefill_tokens=64, disable_radix_cache=true"
        in " ".join(said.split())
    )
    assert len(metrics(tmp_path / "runs/tiny")) == 1
    kept = yaml.safe_load((tmp_path / "runs/tiny/config.yaml").read_text())
    assert kept["rollout"]["external"]["arguments"] == KNOWN
    assert "--max-prefill-tokens 64 --disable-radix-cache" in (tmp_path / "commands").read_text()


def test_an_argument_that_the_engine_does_not_have_ends_a_run_before_models_are_loaded(
    ranks: RankPool, tmp_path: Path
) -> None:
    external = rollout_with(tmp_path, {"max_prefil_tokens": 64})["external"]
    recipe = write_recipe(tmp_path, tiny_model(), {"rollout.engine": "sglang", "rollout.external": external})
    outcome = run(ranks, tmp_path, "train", recipe)
    assert outcome.code != 0
    assert "did you mean 'max_prefill_tokens'?" in " ".join(outcome.errors.split())
    assert "loading" not in outcome.output
    assert not (tmp_path / "commands").read_text().count("--model-path")


def test_a_model_is_served_with_the_arguments_of_the_engine_of_its_run_alone(tmp_path: Path) -> None:
    rollout = RolloutConfig.model_validate(rollout_with(tmp_path, {"max_prefil_tokens": 64}))
    source = replace(find_model(tiny_model(), "policy", print), rollout=rollout)
    with pytest.raises(RecipeError, match=WRONG), open_model(source, "sglang", None, print):
        pass
    with open_model(source, "native", None, print) as served:
        assert served.name == source.name
