"""Runs that train adapters on weights of 4 bits: they are resumed, exported and served."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
import torch
from examples.signal_game.prepare import prepare
from peft import PeftModel
from tests.contracts.plain_engine import PlainEngine
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_lora import logits_of, recipe_of, train_team
from tests.end_to_end.test_ppo import train_until
from tests.end_to_end.test_team import write_game
from tests.tiny import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from leaderless.models.lora.nf4 import check_library, packed, unpacked
from leaderless.run.standalone_model import find_model, open_model
from leaderless.worker.checkpoint.export import export_model

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes, of the extra nf4, is missing")

PACKED: dict[str, object] = {"rank": 3, "base_dtype": "nf4", "base_block": 32}


def plain() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model(num_layers=1), dtype=torch.float32)
    return model


def rounded() -> PreTrainedModel:
    """The model with the numbers that are left of 4 bits."""
    check_library("models.policy")
    model = plain()
    with torch.no_grad():
        for one in model.model.layers.parameters():
            if one.ndim == 2:
                one.copy_(unpacked(packed(one, 32), 32, torch.float32))
    return model


def test_a_run_is_resumed_exported_and_served(ranks: RankPool, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, PACKED)
    (whole,) = ranks.run(1, train_until, recipe, "whole", 4, init_group=False)
    ranks.run(1, train_until, recipe, "parts", 2, init_group=False)
    (parts,) = ranks.run(1, train_until, recipe, "parts", 4, init_group=False)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    assert {name.rpartition(".")[2] for name in whole} == {"lora_A", "lora_B", "version"}, "only adapters are saved"
    rows = [json.loads(line) for line in (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines()]
    found = [row[name] for row in rows for name in row if "mismatch" in name and "kl" in name]
    assert found, "the policy that samples is compared with the one that trains"
    assert max(map(abs, found)) < 1e-5

    checkpoint = tmp_path / "runs/whole/checkpoints/step-000004"
    said = json.loads((checkpoint / "policy/adapter_config.json").read_text())
    assert (said["base_dtype"], said["base_block"]) == ("nf4", 32)
    adapters = export_model(checkpoint, "policy", tmp_path / "adapters")
    assert "base_dtype" not in json.loads((adapters / "adapter_config.json").read_text()), "peft knows no such setting"
    merged = AutoModelForCausalLM.from_pretrained(
        export_model(checkpoint, "policy", tmp_path / "merged", merge=True), dtype=torch.float32
    )
    on_plain, trained = (logits_of(PeftModel.from_pretrained(base, adapters)) for base in (plain(), rounded()))
    torch.testing.assert_close(logits_of(merged), on_plain, atol=1e-5, rtol=0)
    assert (trained - on_plain).abs().max() > 1e-3
    source = find_model(str(checkpoint), "policy", print)
    engine_of_a_user = "tests.contracts.plain_engine:make"
    with open_model(source, engine_of_a_user, None, print) as served, served.serving.phase() as engine:
        sent = logits_of(cast("PlainEngine", engine).model)
    torch.testing.assert_close(sent, trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_agents_on_one_model_have_its_packed_weights_once(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    prepare(tmp_path)
    path = str(tmp_path / "planner")
    models = {name: {"path": path, "lora": PACKED} for name in ("planner", "solver")}
    recipe = str(write_game(tmp_path, "dr_mas", {}, models=models))
    for states, places in ranks.run(world_size, train_team, recipe, "team", True, init_group=False):
        assert places[:2] == places[2:], "both trainers, and both engines"
        changed = {name.split(".")[0] for name, value in states.items() if "lora_B" in name and value.any()}
        assert changed == {"planner", "solver"}


def test_a_run_does_not_continue_on_other_weights(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train_until, recipe_of(tmp_path, PACKED), "run", 2, init_group=False)
    reason = "policy.lora.base_dtype: is float32, but the adapters in .* were trained with nf4: leave it as it was"
    with pytest.raises(Exception, match=reason):
        ranks.run(1, train_until, recipe_of(tmp_path, {"rank": 3}), "run", 4, init_group=False)
