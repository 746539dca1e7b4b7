"""A Qwen2 whose responses have prescribed lengths, although nothing but its weights ends them.

Every sampled token determines how many tokens follow: the first one chooses the length of the response, from a
distribution encoded in the weights, and the next ones count down to the end token. The layers compute as in any Qwen2,
but the matrices by which they add to their input are 0 at first. So every engine samples responses of these lengths,
and two engines sample the same response if the first tokens agree.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,=+"
END = 0
FIRST_COUNTER = 1 + len(CHARACTERS)
LONGEST = 512
CONFIDENCE = 30.0
"""The logit of every token that may follow; those of other tokens are about 0."""

Lengths = Mapping[int, float]
"""The probability of each length from 2 to `LONGEST`, including the end token."""


def remaining(token: int, longest: int = LONGEST) -> int:
    """The number of tokens that follow a counter.

    Args:
        token: Counter, at least `FIRST_COUNTER`.
        longest: Length of the longest response.
    """
    return 1 + (token - FIRST_COUNTER) % (longest - 1)


def heavy_tailed(median: float, sigma: float) -> Lengths:
    """A lognormal distribution; lengths above the longest count as the longest.

    Args:
        median: Median length.
        sigma: Standard deviation of their logarithm.
    """

    def below(length: float) -> float:
        return 0.5 * math.erfc(-math.log(length / median) / sigma / math.sqrt(2))

    lengths = {length: below(length + 0.5) - below(length - 0.5) for length in range(2, LONGEST)}
    return lengths | {LONGEST: 1 - below(LONGEST - 0.5)}


def write_counting_model(
    folder: Path, lengths: Lengths, hidden_size: int, num_layers: int, vocabulary: int, longest: int = LONGEST
) -> int:
    """Write the model with its tokenizer as a Hugging Face folder.

    Args:
        folder: Folder to write.
        lengths: Probability of each length of a response.
        hidden_size: Width of the model; the feed-forward layers are three times as wide.
        num_layers: Number of layers.
        vocabulary: Number of tokens; a few are for prompts, all others count.
        longest: Length of the longest response.

    Returns:
        Number of parameters.
    """
    names = ["<|endoftext|>", *CHARACTERS.replace(" ", "Ġ"), *(f"t{i}" for i in range(FIRST_COUNTER, vocabulary))]
    tokenizer = Qwen2Tokenizer(
        vocab={name: token for token, name in enumerate(names)},
        merges=[],
        unk_token=None,
        eos_token=names[END],
        pad_token=names[END],
    )
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings, head = _countdown(lengths, hidden_size, vocabulary, longest)
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _countdown(lengths: Lengths, hidden_size: int, vocabulary: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[vocabulary, hidden_size] embeddings and head.

    The embedding of a token has the direction of its count. These directions are nearly orthogonal, and that of prompt
    tokens is orthogonal to all others. The head of a token points in the directions that it may follow.
    """
    # Directions of unit length; the final norm scales them by the square root of the hidden size.
    directions = torch.randn(longest, hidden_size)
    directions[:, 0] = 0
    directions = torch.nn.functional.normalize(directions, dim=1)
    directions[0] = torch.nn.functional.one_hot(torch.tensor(0), hidden_size)  # of prompts
    scale = math.sqrt(hidden_size)
    counts = torch.tensor([0 if token < FIRST_COUNTER else remaining(token, longest) for token in range(vocabulary)])
    embeddings = scale * directions[counts]
    sharing = torch.bincount(counts, minlength=longest)
    head = torch.zeros(vocabulary, hidden_size)
    for token in range(FIRST_COUNTER, vocabulary):
        count = int(counts[token])
        if count + 1 < longest:
            head[token] += CONFIDENCE / scale * directions[count + 1]
        if lengths.get(count + 1, 0.0) > 0:
            head[token] += (CONFIDENCE + math.log(lengths[count + 1] / sharing[count])) / scale * directions[0]
    head[END] = CONFIDENCE / scale * directions[1]
    return embeddings, head


def write_prompts(path: Path, prompt_tokens: int, count: int) -> None:
    """Write prompts of random characters, each of which is a token.

    Args:
        path: File of JSON lines.
        prompt_tokens: Length of each prompt.
        count: Number of prompts.
    """
    generator = random.Random(0)
    rows = [{"prompt": "".join(generator.choices(CHARACTERS, k=prompt_tokens)), "answer": "1"} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
