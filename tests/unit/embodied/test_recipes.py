"""The recipes for robots are valid, and the one for a model of seven billion weights says what it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.end_to_end.cli import ROOT
from tests.small_vla import write_small_tokenizer
from tests.small_worlds import Line

from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow

RECIPES = sorted(path.name for path in (ROOT / "recipes/robots").glob("*.yaml"))
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
}


class LikeLibero(Line):
    """What LIBERO shows and takes, without LIBERO."""

    def __init__(self, num: int, suite: str, image_size: int) -> None:  # noqa: ARG002
        super().__init__(num)
        cameras = {"agentview": (image_size, image_size), "robot0_eye_in_hand": (image_size, image_size)}
        self.spaces = Spaces(cameras, 8, Continuous((-1.0,) * 7, (1.0,) * 7), 512, has_instructions=True)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_for_robots_can_be_planned(name: str) -> None:
    recipe = load_recipe(str(ROOT / "recipes/robots" / name)).recipe
    assert make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(1)).world_size == 1
    for dataset in (recipe.data.train, recipe.data.evaluation):
        path = getattr(dataset, "path", "")
        assert not path.startswith("recipes") or (ROOT / path).exists()


@pytest.mark.parametrize(
    ("towers", "layers", "num_weights", "peak", "unchecked_peak"),
    [
        (["tiny_dinov2", "tiny_siglip"], 2, 0.685e9, 6e9, 10e9),
        pytest.param(
            ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
            *(32, 7.5e9, 40e9, 150e9),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["two layers", "all layers"],
)
def test_openvla_oft_fits_into_eight_accelerators_of_80_gb(
    towers: list[str], layers: int, num_weights: float, peak: float, unchecked_peak: float, tmp_path: Path
) -> None:
    statistics = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    about = {
        "timm_model_ids": towers,
        "image_sizes": [224, 224],
        "pad_to_multiple_of": 64,
        "text_config": {**LLAMA_7B, "num_hidden_layers": layers},
        "norm_stats": {"libero_spatial_no_noops": {"action": statistics}},
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    write_small_tokenizer(tmp_path)
    changes = [f"models.policy.body.options.path={tmp_path}", f"body.type={__name__}:LikeLibero"]
    changes += ["models.policy.compute_dtype=bfloat16"]  # as on accelerators
    recipe = load_recipe(str(ROOT / "recipes/robots/libero.yaml"), changes).recipe
    memory = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(8)).memory
    assert memory is not None
    resident = memory.accelerator.resident
    assert resident["policy weights"] == pytest.approx(num_weights * 4 / 8, rel=0.02)
    assert resident["policy engine's weights"] == pytest.approx(num_weights * 2, rel=0.02)
    frames = 64 * 65 * (2 * 3 * 224 * 224 + 4 * 8)
    assert memory.accelerator.host["rows of the step"] == pytest.approx(frames, rel=0.02)
    assert peak < memory.accelerator.peak < 2 * peak
    whole = recipe.models["policy"].model_copy(update={"gradient_checkpointing": False})
    batch = recipe.batch.model_copy(update={"micro_batch_tokens": 512})
    kept = recipe.model_copy(update={"models": {"policy": whole}, "batch": batch})
    unchecked = make_plan(kept, resolve_workflow(recipe.workflow), Cluster(8)).memory
    assert unchecked is not None
    assert unchecked.accelerator.peak > unchecked_peak, "64 decisions of an episode at a time"
