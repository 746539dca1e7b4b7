"""Tiny models and tokenizers, made from scratch for the quickstart, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer, Qwen3Config

END_TOKEN = "<|endoftext|>"  # noqa: S105


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
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
        "max_position_embeddings": max_positions,
        "initializer_range": hidden_size**-0.5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    config = Qwen2Config(**sizes) if family == "qwen2" else Qwen3Config(head_dim=hidden_size // num_heads, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder
