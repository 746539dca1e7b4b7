"""A tiny model that sees images, made from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from leaderless.models.loading.tiny import END_TOKEN, UNKNOWN_TOKEN


def write_vision_model(  # noqa: PLR0913 - each has a default
    folder: Path,
    words: Iterable[str],
    *,
    family: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"] = "qwen3_vl",
    hidden_size: int = 64,
    num_layers: int = 2,
    vision_size: int = 32,
    num_vision_layers: int = 2,
    patch_size: int = 4,
    largest_side: int = 64,
    seed: int = 0,
) -> Path:
    """Write a randomly initialized model that sees images, with a tokenizer of whole words, as a Hugging Face folder.

    Args:
        folder: Folder to write.
        words: Texts that are a token each; a text may have nothing else in it.
        family: Architecture.
        hidden_size: Width of the layers for text; a multiple of 32.
        num_layers: Number of these.
        vision_size: Width of the layers for images; a multiple of 8.
        num_vision_layers: Number of these.
        patch_size: Pixels of a side of a patch; four patches make a token.
        largest_side: Pixels of a side of the largest square that is not shrunk.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    core = Tokenizer(models.WordLevel({END_TOKEN: 0, UNKNOWN_TOKEN: 1}, unk_token=UNKNOWN_TOKEN))
    core.decoder = decoders.Fuse()
    # Added tokens are found before anything is split, the longest first, and pieces between them are unknown.
    core.add_tokens([AddedToken(word, normalized=False) for word in dict.fromkeys(words)])
    core.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    ends = {"eos_token": END_TOKEN, "pad_token": END_TOKEN, "unk_token": UNKNOWN_TOKEN}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **ends)
    tokenizer.save_pretrained(folder)
    ids = dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True))
    sections = [hidden_size // 16, hidden_size // 32, hidden_size // 32]
    text: dict[str, object] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": hidden_size**-0.5,
        "eos_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    vision: dict[str, object] = {
        "depth": num_vision_layers,
        "num_heads": 4,
        "hidden_size": vision_size,
        "intermediate_size": 3 * vision_size,
        "out_hidden_size": hidden_size,
        "patch_size": patch_size,
        "initializer_range": vision_size**-0.5,
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    if family in {"qwen3_vl", "qwen3_vl_moe"}:
        text["head_dim"], rope["mrope_interleaved"] = hidden_size // 4, True
        vision |= {"num_position_embeddings": (largest_side // patch_size) ** 2, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"window_size": 8 * patch_size, "fullatt_block_indexes": [num_vision_layers - 1]}
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    if family == "qwen2_vl":
        vision |= {"embed_dim": vision_size, "hidden_size": hidden_size, "mlp_ratio": 3}
    config = AutoConfig.for_model(
        family,
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    sides = {"min_pixels": (2 * patch_size) ** 2, "max_pixels": largest_side**2}
    Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2, **sides).save_pretrained(folder)
    return folder
