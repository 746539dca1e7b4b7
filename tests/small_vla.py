"""Small models of vision, language and action with random weights, in the form of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerFast

from leaderless.embodied.policies.pi05_network import Pi05Config, Pi05Network
from leaderless.embodied.policies.prismatic import Prismatic, VlaConfig

NUM_WORDS, NUM_PADDED = 400, 16
TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": NUM_WORDS + NUM_PADDED,
}


def write_small_vla(folder: Path, *, dim: int = 2, seed: int = 0) -> Path:
    """Write a model and its tokenizer of bytes, whose prompts begin with <s> and can end with an empty word."""
    folder.mkdir(parents=True, exist_ok=True)
    statistics = {"q01": [-0.5] * dim, "q99": [0.75] * dim, "mask": [True] * (dim - 1) + [False]}
    config = {
        "timm_model_ids": ["tiny_dinov2", "tiny_siglip"],
        "image_sizes": [28, 28],
        "pad_to_multiple_of": NUM_PADDED,
        "text_config": TEXT,
        "norm_stats": {"small_arm": {"action": statistics}, "other_arm": {"action": {"q01": [0.0], "q99": [1.0]}}},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Prismatic(VlaConfig.read(folder))
        for name, parameter in model.named_parameters():
            if "scale_factor" in name or "token" in name or "lm_head" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    weights = {name: one.detach().contiguous() for name, one in model.named_parameters()}
    # Published files also have what features do not depend on.
    weights["vision_backbone.featurizer.norm.weight"] = torch.ones(16)
    weights["vision_backbone.featurizer.blocks.2.norm1.weight"] = torch.ones(16)
    weights["vision_backbone.fused_featurizer.attn_pool.latent"] = torch.ones(1, 1, 24)
    names = sorted(weights)
    for part, some in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = folder / f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in some}, file)
    write_small_tokenizer(folder)
    return folder


def write_small_tokenizer(folder: Path) -> None:
    words = ["<unk>", "<s>", "</s>", "▁", "\n", *(chr(code) for code in range(33, 127))]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Replace("▁", " ")
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def write_small_pi0(folder: Path, *, state_size: int = 3, dim: int = 2) -> Path:
    """Write a pi0 that plans 4 steps of 5 numbers, the statistics of a robot, and a tokenizer."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", "hidden_size": 32, **sizes, **heads},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                **sizes,
                "patch_size": 14,
                "image_size": 28,
                "vision_use_head": False,
            },
            "projection_dim": 32,
            "image_token_id": 299,
        },
        dit_config={"model_type": "gemma", "hidden_size": 24, **sizes, **heads},
        chunk_size=4,
        max_state_dim=6,
        max_action_dim=5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = PI0ForConditionalGeneration(config)
        for parameter in model.parameters():  # far enough from 0 that everything matters
            parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    about = {"state_mean": [0.1] * state_size, "state_std": [2.0] * state_size}
    about |= {"actions_mean": [0.25] * dim, "actions_std": [0.5] * dim}
    (folder / "processor_config.json").write_text(json.dumps(about), encoding="utf-8")
    write_small_tokenizer(folder)
    return folder


def write_small_pi05(folder: Path, *, state_size: int = 3, dim: int = 2) -> Path:
    """Write a pi0.5 of 4 steps of 5 numbers under published names, the quantiles of a robot, and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "type": "pi05",
        "paligemma_variant": "tiny",
        "action_expert_variant": "tiny_expert",
        "image_resolution": [28, 28],
        "chunk_size": 4,
        "max_state_dim": 6,
        "max_action_dim": 5,
    }
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Pi05Network(Pi05Config.read(folder))
        for parameter in network.parameters():  # far enough from 0 that everything matters
            parameter.data += 0.1 * torch.randn(parameter.shape)
    weights = {published_pi05(name): one.detach().contiguous() for name, one in network.named_parameters()}
    weights["model.paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.zeros(300, 24)
    save_file(weights, folder / "model.safetensors")
    quantiles = {"observation.state.q01": -2.0, "observation.state.q99": 2.5, "action.q01": -0.25, "action.q99": 0.75}
    sizes = {"observation.state": state_size, "action": dim}
    found = {name: torch.full((sizes[name.rpartition(".")[0]],), value) for name, value in quantiles.items()}
    save_file(found, folder / "policy_preprocessor_step_2_normalizer_processor.safetensors")
    write_small_tokenizer(folder)
    return folder


def published_pi05(name: str) -> str:
    """The name of a weight in a checkpoint of LeRobot."""
    at, pali = "model.paligemma_with_expert", "model.paligemma_with_expert.paligemma"
    if name.startswith("vlm.language_model.embed_tokens."):
        return name.replace("vlm.language_model.embed_tokens", f"{pali}.lm_head")
    for own, theirs in {
        "vlm.vision_tower.": f"{pali}.model.vision_tower.vision_model.",
        "vlm.": f"{pali}.model.",
        "expert.": f"{at}.gemma_expert.model.",
    }.items():
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return f"model.{name}"
