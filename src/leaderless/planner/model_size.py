"""The size of a model from its `config.json`, without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from leaderless.config.models import ModelConfig


@dataclass(frozen=True)
class ModelSize:
    """What memory and cost depend on, for a decoder-only transformer.

    Attributes:
        num_parameters: All weights, tied ones once.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layer.
        vocab_size: Rows of the embedding.
        num_kv_heads: Key-value heads of a layer.
        head_dim: Width of a head.
        max_positions: Longest sequence, in tokens.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in float32."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4


def read_model_size(model: ModelConfig) -> ModelSize | None:
    """The size of a model, or None when its `config.json` is not on this machine or is of no known shape.

    Args:
        model: A local folder, or a hub model, which is looked for in the local cache only.
    """
    path = _config_path(model)
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _decoder_size(config)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _config_path(model: ModelConfig) -> Path | None:
    local = Path(model.path)
    if local.exists():
        return local / "config.json" if (local / "config.json").exists() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _decoder_size(config: dict[str, int]) -> ModelSize:
    """Count the weights of a Llama-like decoder: Llama, Mistral, Qwen2, Qwen3 and their kin."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    intermediate, heads = config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    query, key_value = heads * head_dim, kv_heads * head_dim
    attention = hidden * (query + 2 * key_value) + query * hidden
    model_type = str(config.get("model_type"))
    if model_type.startswith("qwen2") or config.get("attention_bias"):
        attention += query + 2 * key_value
    if not model_type.startswith("qwen2") and config.get("attention_bias"):
        attention += hidden
    if model_type.startswith("qwen3"):
        attention += 2 * head_dim
    layer = attention + _feed_forward(config, hidden, intermediate) + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        num_parameters=layers * layer + embeddings + hidden,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=config["max_position_embeddings"],
    )


def _feed_forward(config: dict[str, int], hidden: int, intermediate: int) -> int:
    """Weights of one feed-forward layer, dense or a mixture of experts."""
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return 3 * hidden * intermediate
    width = config.get("moe_intermediate_size") or intermediate
    shared = config.get("shared_expert_intermediate_size") or 0
    return experts * 3 * hidden * width + hidden * experts + 3 * hidden * shared + (hidden if shared else 0)
