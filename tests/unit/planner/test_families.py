"""Every family of language models is computed right, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from tests.tiny_families import FILE, judge_family, tiny_config
from tests.unit.recipes import plan_of, write_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leaderless.config import RecipeError
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.decoder import Decoder
from leaderless.models.parallel.tensor import TensorParallel
from leaderless.planner.checks.model_files import UNDIVIDED

TABLE = json.loads(FILE.read_text(encoding="utf-8"))
QUICK = {
    "biogpt",  # dropout of functions
    "bloom",  # attention of its own
    "deepseek_v3",  # values that are narrower than keys
    "falcon_h1",  # a state space next to attention
    "gemma3_text",  # layers of several types
    "glm_moe_dsa",  # an indexer, whose choice layers share
    "gpt_oss",  # sinks
    "lfm2",  # short convolutions
    "llama4_text",  # temperatures by positions
    "mamba",  # states that continue token by token
    "minimax",  # lightning attention
    "mistral",  # a window
    "opt",  # layers that are skipped
    "qwen3_next",  # linear attention
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


DIVISIBLE = {"gemma", "gemma3_text", "glm", "granite", "mistral", "olmo2", "phi", "phi3", "smollm3", "whisper"}
"""Families that `make test` tries to divide."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in DIVISIBLE else [pytest.mark.thorough])
        for name, listed in TABLE["families"].items()
        if "refused" not in listed
    ],
)
def test_the_planner_knows_which_families_cannot_be_divided(tmp_path: Path, family: str) -> None:
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config, refusal = tiny_config(family), ""
    with torch.device("meta"):
        decoder = Decoder(AutoModelForCausalLM.from_config(config))
    try:
        TensorParallel.divide(decoder, ProcessGroup((0, 1), 0), "models.policy")
    except RecipeError as error:
        refusal = str(error)
    if "each would have all experts" in refusal:
        pytest.skip("its experts have to be divided, too")
    assert (config.model_type in UNDIVIDED) == bool(refusal), refusal
    model = {"policy": write_model(tmp_path / "model", model_type=config.model_type)}
    if refusal:
        with pytest.raises(RecipeError, match=f"layout.policy.tp: tp=2: .* type {config.model_type}, .* leave out tp"):
            plan_of("grpo", 2, models=model, layout={"policy": {"tp": 2}})
    else:
        plan_of("grpo", 2, models=model, layout={"policy": {"tp": 2}})


def test_every_family_is_listed() -> None:
    if Version(transformers.__version__) > Version(TABLE["transformers"]):
        pytest.skip("run python -m tests.tiny_families to try the families of a newer transformers")
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(TABLE["families"])
