"""Tiny models and tokenizers, made from scratch for the quickstart, tests and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

END_TOKEN, UNKNOWN_TOKEN = "<|endoftext|>", "<|unknown|>"
PATCH_SIZE = 4
"""Pixels of a side of a patch of an image; four patches make a token."""


def write_tiny_model(  # noqa: PLR0913
    folder: Path,
    characters: Iterable[str],
    *,
    family: Literal["qwen2", "qwen3"] = "qwen2",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    max_positions: int = 512,
    chat_template: str | None = None,
    words: Sequence[str] = (),
    is_tied: bool = True,
    seed: int = 0,
) -> Path:
    """Write a randomly initialized model and a tokenizer of single bytes as a Hugging Face folder.

    Args:
        folder: Folder to write.
        characters: Characters of the tokenizer, besides its end token; it skips all others.
        family: Architecture.
        hidden_size: Width; a multiple of `num_heads`.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads; there are half as many key-value heads.
        max_positions: Longest sequence.
        chat_template: Chat template of the tokenizer, in Jinja.
        words: Texts that are one token each.
        is_tied: Whether the output head has the weights of the token embeddings.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
    to_symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = {symbol for text in characters for part, _ in to_symbols.pre_tokenize_str(text) for symbol in part}
    vocabulary = {token: index for index, token in enumerate([END_TOKEN, *sorted(symbols)])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        chat_template=chat_template,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    numbers = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}
    sizes = _sizes(tokenizer, **numbers, max_positions=max_positions, is_tied=is_tied)
    config = Qwen2Config(**sizes) if family == "qwen2" else Qwen3Config(head_dim=hidden_size // num_heads, **sizes)
    return _write_model(folder, tokenizer, config, seed)


def write_word_model(
    folder: Path, words: Iterable[str], pieces: Iterable[str], *, hidden_size: int, num_layers: int, seed: int = 0
) -> Path:
    """Write a randomly initialized Qwen3 and a tokenizer of whole words as a Hugging Face folder.

    Args:
        folder: Folder to write.
        words: Texts that are a token each, with the blanks that belong to them, if no letter follows on their last
            letter. Where several fit, the longest is one.
        pieces: Texts that are a token each within other words, too.
        hidden_size: Width; a multiple of 4.
        num_layers: Number of decoder layers.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
    whole, part = (sorted({*texts}, key=lambda text: (-len(text), text)) for texts in (words, pieces))
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([END_TOKEN, UNKNOWN_TOKEN, *whole, *part]))}
    pattern = "|".join(
        [*(re.escape(word) + r"(?![A-Za-z])" * word[-1].isalpha() for word in whole), *map(re.escape, part)]
    )
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    # With other families, `transformers` loads a tokenizer of its own in place of this one.
    sizes = _sizes(tokenizer, hidden_size=hidden_size, num_layers=num_layers)
    return _write_model(folder, tokenizer, Qwen3Config(head_dim=hidden_size // 4, **sizes), seed)


def _sizes(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int = 4,
    max_positions: int = 512,
    is_tied: bool = True,
) -> dict[str, object]:
    """Settings of the layers for text."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
        "max_position_embeddings": max_positions,
        "initializer_range": hidden_size**-0.5,
        "tie_word_embeddings": is_tied,
        "eos_token_id": 0,
        "bos_token_id": None,
    }


def _write_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    config: PreTrainedConfig,
    seed: int,
    kind: type[AutoModelForCausalLM | AutoModelForImageTextToText] = AutoModelForCausalLM,
) -> Path:
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config)
    model.save_pretrained(folder)
    return folder


def write_vision_model(
    folder: Path,
    words: Iterable[str],
    *,
    family: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"] = "qwen3_vl",
    hidden_size: int = 64,
    num_layers: int = 2,
    vision_size: int = 32,
    num_vision_layers: int = 2,
    largest_side: int = 64,
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
        largest_side: Pixels of a side of the largest square that is not shrunk.

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
    ids = dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True))
    sections = [hidden_size // 16, hidden_size // 32, hidden_size // 32]
    text = _sizes(tokenizer, hidden_size=hidden_size, num_layers=num_layers, max_positions=1024)
    vision: dict[str, object] = {
        "depth": num_vision_layers,
        "num_heads": 4,
        "hidden_size": vision_size,
        "intermediate_size": 3 * vision_size,
        "out_hidden_size": hidden_size,
        "patch_size": PATCH_SIZE,
        "initializer_range": vision_size**-0.5,
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    if family in {"qwen3_vl", "qwen3_vl_moe"}:
        text["head_dim"], rope["mrope_interleaved"] = hidden_size // 4, True
        vision |= {"num_position_embeddings": (largest_side // PATCH_SIZE) ** 2, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"window_size": 8 * PATCH_SIZE, "fullatt_block_indexes": [num_vision_layers - 1]}
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
    sides = {"min_pixels": (2 * PATCH_SIZE) ** 2, "max_pixels": largest_side**2}
    Qwen2VLImageProcessorPil(patch_size=PATCH_SIZE, merge_size=2, **sides).save_pretrained(folder)
    return _write_model(folder, tokenizer, config, 0, AutoModelForImageTextToText)
