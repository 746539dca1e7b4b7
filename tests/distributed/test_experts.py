"""Mixtures of experts: ranks that divide their weights compute what one does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_training import largest_difference, train_one_update
from tests.tiny import tiny_model
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

SIZES = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def experts_model(folder: Path, family: str) -> str:
    """A model with experts and the tokenizer of the others."""
    shutil.copytree(tiny_model("qwen3"), folder / family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder / family)
    return str(folder / family)


@pytest.mark.parametrize(
    ("family", "world_size", "changes"),
    [("qwen3_moe", 2, {}), ("qwen3_moe", 4, {"gradient_checkpointing": True}), ("mixtral", 2, {})],
)
def test_ranks_that_divide_experts_learn_like_one(
    ranks: RankPool, tmp_path: Path, family: str, world_size: int, changes: dict[str, object]
) -> None:
    model = experts_model(tmp_path, family)
    (expected,) = ranks.run(1, train_one_update, model, 4096, {}, 2)
    experts = [name for name in expected if name.startswith("gradients.") and "experts" in name]
    assert len(experts) == 4
    assert all(expected[name].abs().sum() > 0 for name in experts)
    difference = largest_difference(ranks.run(world_size, train_one_update, model, 31, changes, 2), expected)
    print(difference)
    assert difference < 1e-5
