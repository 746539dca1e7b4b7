"""Tokenizers."""

from __future__ import annotations

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.sources.hub import explained, unreachable_hub
from leaderless.models.decoder import load_model_config

END_TOKEN = "<|endoftext|>"  # noqa: S105 - no password


def load_tokenizer(config: ModelConfig, role: str) -> Tokenizer:
    """Load the tokenizer of a model; its role is for errors.

    Raises:
        RecipeError: There is no tokenizer.
    """
    unreachable = unreachable_hub(config.path)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        # `transformers` raises errors of every kind for damaged folders.
        load_model_config(config, role)  # which it reads first, and is to be blamed on its own
        raise RecipeError.at(
            f"models.{role}", f"the tokenizer of '{config.path}' cannot be loaded: {explained(error, unreachable)}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # Without files, `transformers` makes an empty tokenizer.
        raise RecipeError.at(f"models.{role}", f"'{config.path}' has no tokenizer: put its files next to the model")
    return tokenizer


def load_chat_tokenizer(config: ModelConfig, role: str) -> Tokenizer:
    """Load the tokenizer of a model that is asked in a chat; its role is for errors.

    Raises:
        RecipeError: There is no tokenizer, or it has no chat template.
    """
    tokenizer = load_tokenizer(config, role)
    if tokenizer.chat_template is None:
        raise RecipeError.at(
            f"models.{role}",
            f"the tokenizer of '{config.path}' has no chat template, and a judge is asked in a chat: choose a model "
            "that was trained on chats",
        )
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer whose tokens are bytes, for runs in which no model reads text."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([END_TOKEN, *symbols])}
    ends = {"eos_token": END_TOKEN, "pad_token": END_TOKEN}
    tokenizer: Tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=None, **ends)
    return tokenizer


def end_tokens(config: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Find tokens that end a response: the tokenizer's, and others in the model's generation settings."""
    from transformers import GenerationConfig

    ends = {tokenizer.eos_token_id}
    try:
        extra = GenerationConfig.from_pretrained(config.path, revision=config.revision).eos_token_id
    except OSError:
        extra = None
    ends.update(extra if isinstance(extra, list) else [extra])
    return frozenset(token for token in ends if token is not None)


def check_vocabulary(num_embeddings: int, tokenizer: Tokenizer, role: str) -> None:
    """Refuse a model that has no embedding for some of the tokens of the policy's tokenizer."""
    if len(tokenizer) > num_embeddings:
        raise RecipeError.at(
            f"models.{role}",
            f"has embeddings for {num_embeddings} tokens, but the tokenizer has {len(tokenizer)}: all roles must share "
            "one tokenizer",
        )
