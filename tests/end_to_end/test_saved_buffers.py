"""What models have besides weights, as scales of layers and biases that choose experts, goes wherever weights go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, succeed
from tests.tiny import tiny_model, write_recipe
from tests.tiny_families import tiny_config, write_family
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.config import RecipeError
from leaderless.models.loading.saved_buffers import FILE, saved_buffers
from leaderless.worker.checkpoint.export import _write_whole

APART = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}


@pytest.mark.parametrize("family", ["gemma4_text", "glm4_moe"])
def test_the_values_of_a_folder_are_sampled_with_and_exported(ranks: RankPool, tmp_path: Path, family: str) -> None:
    origin = tmp_path / "origin"
    shutil.copytree(tiny_model(), origin)
    (origin / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(origin)
    words = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    write_family(tiny_config(family, **words), origin)
    changes = {"layout": APART, "optimizer.learning_rate": 0.01, "reward": {"format": {"pattern": "[^0-9]*"}}}
    write_recipe(tmp_path, str(origin), changes)
    succeed(ranks, tmp_path, "train", "recipe.yaml", num_ranks=2)
    steps = metrics(tmp_path / "runs/tiny")
    assert len(steps) == 2
    assert all(one["mismatch/abs_max"] < 1e-4 for one in steps)
    succeed(ranks, tmp_path, "export", "runs/tiny", "exported")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("origin", "exported"))
    own = saved_buffers(before)
    assert own
    assert all(torch.equal(value, saved_buffers(after)[name]) for name, value in own.items())
    assert not torch.equal(before.get_input_embeddings().weight, after.get_input_embeddings().weight)
    (newest,) = (tmp_path / "runs/tiny/checkpoints").glob("step-000002")
    (newest / "policy" / FILE).unlink()  # as an earlier version wrote it
    with pytest.raises(RecipeError, match=f"lacks {min(own)}, which is no trained weight: it was written by an older"):
        _write_whole(newest / "policy", tmp_path / "again", is_critic=False)
