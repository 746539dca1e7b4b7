"""Tiny models and tokenizers, made from scratch for the quickstart, tests and benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2Tokenizer, Qwen3Config

END_TOKEN, UNKNOWN_TOKEN = "<|endoftext|>", "<|unknown|>"


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
    return _write_model(
        folder,
        tokenizer,
        family=family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_positions=max_positions,
        is_tied=is_tied,
        seed=seed,
    )


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
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": 4, "max_positions": 512}
    return _write_model(folder, tokenizer, family="qwen3", is_tied=True, seed=seed, **sizes)


def _write_model(  # noqa: PLR0913
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    family: Literal["qwen2", "qwen3"],
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    max_positions: int,
    seed: int,
    is_tied: bool,
) -> Path:
    tokenizer.save_pretrained(folder)
    sizes = {
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
    config = Qwen2Config(**sizes) if family == "qwen2" else Qwen3Config(head_dim=hidden_size // num_heads, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder
