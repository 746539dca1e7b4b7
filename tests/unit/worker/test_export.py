"""What is exported has the weights of the checkpoint, whatever the model's description says of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_model
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.worker.checkpoint.export import _write_whole


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_head_that_is_described_as_the_embedding_but_is_another_stays_so(tmp_path: Path, is_apart: bool) -> None:
    origin, source, out = (tmp_path / name for name in ("origin", "source", "out"))
    shutil.copytree(tiny_model(), origin)
    assert json.loads((origin / "config.json").read_text())["tie_word_embeddings"]
    weights = load_file(origin / "model.safetensors")
    words = weights["model.embed_tokens.weight"]
    if is_apart:
        weights["lm_head.weight"] = words + torch.randn(words.shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, origin / "model.safetensors", {"format": "pt"})
    source.mkdir()
    trained = load_causal_lm(ModelConfig(path=str(origin)), "policy")
    trained.write_description(source)
    named = {f"weights.{name}": one.detach() for name, one in trained.trained_weights()}
    save_file(named, source / "shard.safetensors")
    _write_whole(source, out, is_critic=False)
    found = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(found.lm_head.weight, weights.get("lm_head.weight", words))
    assert torch.equal(found.get_input_embeddings().weight, words)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is not is_apart
