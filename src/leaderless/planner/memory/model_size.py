"""The size of a model from its `config.json`, without loading it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from leaderless.base.errors import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.planner.graph.adapters import lora_of
from leaderless.planner.memory.attention_kinds import FULL, attention_kinds
from leaderless.planner.memory.decoder_size import LayerSize, ModelSize
from leaderless.planner.memory.layer_parts import Described, LayerPart
from leaderless.planner.memory.layers import (
    TEXT_PART,
    Linear,
    decoder_layers,
    num_adapter_weights,
    of_text,
    widest_inputs,
    with_adapters,
)
from leaderless.planner.memory.unlike_layers import (
    FAMILY_LAYERS,
    WITH_TEXT_PART,
    UnlikeLayers,
    unlike_layers,
    usual_names,
)
from leaderless.planner.memory.vision_size import TEXT, VisionSize, text_config, vision_tower

QKV_BIAS = {"qwen2", "qwen2_moe"}
"""Families with biases in queries, keys and values, whatever their configuration says."""
NO_BIAS = {"mistral", "mixtral", "phi3"}
"""Families without biases in attention, whatever their configuration says."""
TIED_UNLESS_SAID = {"gemma", "smollm3"}
"""Families whose output embedding is the input embedding when their configuration does not say."""
FAMILIES = QKV_BIAS | NO_BIAS | TIED_UNLESS_SAID | {"granite", "llama", "qwen3", "qwen3_moe"}
"""Families whose layers are all alike and are counted, as the configuration's `model_type` calls them."""

UNLIKE = {*FAMILY_LAYERS, *WITH_TEXT_PART}
"""Families whose layers are not alike, or have parts of their own, and are counted."""
COUNTED = {*FAMILIES, *UNLIKE, *TEXT}
"""All families that are counted."""

_QWEN_WINDOWS = {"use_sliding_window": False, "max_window_layers": 28}
"""Settings of windows of Qwen's families, unless a `config.json` has others."""
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def read_model_size(model: ModelConfig, key: str = "models", *, is_critic: bool = False) -> ModelSize | None:
    """The size of a model, or None when its `config.json` is not on this machine or is of no known shape.

    A hub model is looked for in the local cache only. A critic has one output in place of the output embedding.
    Errors name `key`, the setting of the model.
    """
    path, lora = model_file(model, "config.json"), lora_of(model, key)
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or str(config.get("model_type")) not in COUNTED:
            return None
        vision: VisionSize | None = None
        seen: Sequence[Linear] = ()
        if config["model_type"] in TEXT:
            vision, seen = vision_tower(config, is_frozen=model.freeze_vision)
            config = text_config(config)
        own: UnlikeLayers | None = None
        if config["model_type"] in UNLIKE:
            config = usual_names(config)
        nothing = next((name for name in _COUNTS if name in config and int(config[name]) < 1), None)
        if nothing is None and config["model_type"] in UNLIKE:
            own = unlike_layers(config)
            size = _unlike_size(config, own, is_critic=is_critic)
            return _with_linear_adapters(size, own, model, lora) if lora else size
        if nothing is None:
            size = _decoder_size(config, vision, is_critic=is_critic)
            return _with_adapters(size, config, seen, model, lora) if lora else size
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return None
    raise RecipeError.at(key, f"{path}: {nothing} is {config[nothing]}, but must be at least 1: the file is damaged")


def model_file(model: ModelConfig, name: str) -> Path | None:
    """A file of a model's folder, on this machine or in the cache of the hub; None where there is none."""
    if not model.path:
        return None
    local = Path(model.path)
    if local.exists():
        return local / name if (local / name).exists() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model.path, name, revision=model.revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _decoder_size(config: dict[str, int], vision: VisionSize | None, *, is_critic: bool) -> ModelSize:
    family = str(config["model_type"])
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    query, key_value = heads * head_dim, kv_heads * head_dim
    attention = hidden * (query + 2 * key_value) + query * hidden
    if family in QKV_BIAS:
        attention += query + 2 * key_value
    elif config.get("attention_bias") and family not in NO_BIAS:
        attention += query + 2 * key_value + hidden
    if family.startswith("qwen3"):
        attention += 2 * head_dim
    is_tied = is_critic or config.get("tie_word_embeddings", family in TIED_UNLESS_SAID)
    head = hidden + 1 if is_critic else 0
    embeddings = vocab * hidden * (1 if is_tied else 2) + head
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    num_mixed, intermediate = sum(_is_mixture(config, layer) for layer in range(layers)), config["intermediate_size"]
    feed_forward = [_feed_forward(config, layer) for layer in range(layers)]
    in_layers = layers * (attention + 2 * hidden) + sum(weights for weights, _ in feed_forward)
    in_layers += vision.num_parameters if vision else 0
    described = (_QWEN_WINDOWS if family.startswith("qwen") else {}) | config
    kinds = attention_kinds(described)
    is_plain = all(kind == FULL for kind in kinds)
    return ModelSize(
        num_parameters=in_layers + embeddings + hidden,
        num_layer_parameters=in_layers,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=max(width for _, width in feed_forward),
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        has_head_norms=family.startswith("qwen3"),
        num_experts=experts,
        num_chosen_experts=config.get("num_experts_per_tok", 1) if experts else 0,
        num_expert_parameters=num_mixed * experts * 3 * hidden * (config.get("moe_intermediate_size") or intermediate),
        max_positions=config["max_position_embeddings"],
        is_tied=bool(is_tied) and not is_critic,
        is_plain=is_plain,
        kinds=() if is_plain else kinds,
        vision=vision,
        rows=_rows(config, hidden, query, key_value),
    )


def _rows(config: dict[str, int], hidden: int, query: int, key_value: int) -> dict[int, int]:
    """Weights in matrices of all layers, by the length of their rows: a row has a weight for each input."""
    found = Counter[int]()
    for layer in range(config["num_hidden_layers"]):
        found.update({hidden: hidden * (query + 2 * key_value)})
        found.update({query: query * hidden})
        inner, experts = config["intermediate_size"], 0
        if _is_mixture(config, layer) and (
            experts := config.get("num_experts") or config.get("num_local_experts") or 0
        ):
            width = config.get("moe_intermediate_size") or inner
            inner = config.get("shared_expert_intermediate_size") or 0
            found.update({hidden: experts * hidden * (2 * width + 1) + (hidden if inner else 0)})
            found.update({width: experts * width * hidden})
        found.update({hidden: 2 * hidden * inner})
        found.update({inner: inner * hidden} if inner else {})
    return dict(found)


def _unlike_size(config: Mapping[str, object], own: UnlikeLayers, *, is_critic: bool) -> ModelSize:
    described, kinds = Described(config), own.kinds
    heads = max(own.heads, key=lambda one: one.query_size + one.kv_values)
    hidden, vocab = described.count("hidden_size"), described.count("vocab_size")
    row, is_tied = FAMILY_LAYERS[str(config["model_type"])], described.flag("tie_word_embeddings")
    root = vocab * hidden * (1 if is_tied or is_critic else 2) + (hidden + 1) * is_critic + hidden
    root += own.besides.num_parameters
    in_layers = sum(part.num_parameters for part in own.parts)
    experts = described.count("num_experts", 0)
    return ModelSize(
        num_parameters=in_layers + root,
        num_layer_parameters=in_layers,
        num_layers=len(own.parts),
        hidden_size=hidden,
        intermediate_size=max(part.inner_size for part in own.parts),
        vocab_size=vocab,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        has_head_norms=bool(row.head_norms),
        max_positions=described.count("max_position_embeddings"),
        num_experts=experts,
        num_expert_parameters=sum(part.num_expert_parameters for part in own.parts),
        num_chosen_experts=described.count("num_experts_per_tok") if experts else 0,
        is_tied=is_tied and not is_critic,
        is_plain=all(kind == FULL for kind in kinds) and not (row.has_sinks or heads.num_latents),
        kinds=kinds,
        layers=tuple(
            LayerSize(
                part.num_parameters,
                part.num_expert_parameters,
                part.inner_size,
                part.num_kept,
                chooses,
                None if one == heads else one,
            )
            for part, chooses, one in zip(own.parts, own.has_indexer, own.heads, strict=True)
        ),
        recurrence=own.recurrence,
        num_latents=heads.num_latents,
        indexer=own.indexer,
        num_norms=row.num_norms,
        rows=_rows_of_parts(own.parts, described.count("moe_intermediate_size", 0), hidden, experts),
    )


def _rows_of_parts(parts: Sequence[LayerPart], width: int, hidden: int, experts: int) -> dict[int, int]:
    """The same of layers that are not alike; what goes back from experts of a width is a third of their weights."""
    found = Counter[int]()
    for part in parts:
        for linear in part.linears:
            found.update({linear.inputs: linear.inputs * linear.outputs})
        if part.num_expert_parameters:
            back = part.num_expert_parameters // 3
            found.update({hidden: part.num_expert_parameters - back + hidden * experts})  # with what chooses them
            found.update({width: back})
    return dict(found)


def _with_linear_adapters(size: ModelSize, own: UnlikeLayers, model: ModelConfig, lora: LoraConfig) -> ModelSize:
    """A model with adapters on the linear layers that its parts have.

    Raises:
        ValueError: Experts have adapters, which are not counted here.
    """
    if lora.expert_rank is not None:
        raise ValueError("adapters of experts are not counted")
    layers = [linear._replace(name=own.prefix + linear.name) for linear in own.besides.linears]
    layers += [
        linear._replace(name=f"{own.prefix}layers.{number}.{linear.name}")
        for number, part in enumerate(own.parts)
        for linear in part.linears
    ]
    size = _with_linears(size, layers, lora)
    names = {*with_adapters(lora, [one.name for one in layers], freezes_vision=model.freeze_vision)}
    adapted = [one for one in layers if one.name in names]
    total, whole = num_adapter_weights(lora.rank, adapted)
    return replace(
        size,
        num_adapter_parameters=total,
        num_whole_adapter_parameters=whole,
        adapted=tuple(one.name for one in adapted),
        dropped_inputs=widest_inputs(adapted) if lora.dropout else (0, 0),
    )


def _with_linears(size: ModelSize, layers: Sequence[Linear], lora: LoraConfig) -> ModelSize:
    """A model with the linear layers for text of all of its layers, whose weights may have 4 bits."""
    names = {*of_text([one.name for one in layers])}
    own = tuple(one for one in layers if one.name in names)
    packed = sum(one.inputs * one.outputs for one in own) if lora.packed_block else 0
    return replace(size, linears=own, num_packed_parameters=packed)


def _with_adapters(
    size: ModelSize, config: Mapping[str, int], seen: Sequence[Linear], model: ModelConfig, lora: LoraConfig
) -> ModelSize:
    """A model with adapters on linear layers and, with a rank of their own, on experts."""
    hidden, query, key = size.hidden_size, size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    is_mixed = bool(config.get("num_experts") or config.get("num_local_experts"))
    mixed = [is_mixed and _is_mixture(config, layer) for layer in range(size.num_layers)]
    layers = [*decoder_layers(config, (hidden, query, key), mixed)]
    if size.vision is not None:
        layers = [one._replace(name=TEXT_PART + one.name.removeprefix("model.")) for one in layers] + [*seen]
    size = _with_linears(size, layers, lora)
    names = {*with_adapters(lora, [one.name for one in layers], freezes_vision=model.freeze_vision)}
    own = [one for one in layers if one.name in names]
    total, whole = num_adapter_weights(lora.rank, own)
    widest = widest_inputs(own) if lora.dropout else (0, 0)
    rank = lora.rank_of_expert(size.num_chosen_experts or 1)
    with_experts = [layer for layer, has_experts in enumerate(mixed) if has_experts and rank is not None]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    # An adapter of each expert's gate and other factor, and one of what comes back; ranks divide all with the experts.
    of_experts = len(with_experts) * size.num_experts * (rank or 0) * ((hidden + 2 * inner) + (inner + hidden))
    return replace(
        size,
        num_adapter_parameters=total + of_experts,
        num_whole_adapter_parameters=whole,
        num_expert_adapter_parameters=of_experts,
        adapted=(*(one.name for one in own), *(f"model.layers.{layer}.mlp.experts" for layer in with_experts)),
        dropped_inputs=widest,
    )


def _feed_forward(config: dict[str, int], layer: int) -> tuple[int, int]:
    """Weights of a layer's feed-forward part, dense or a mixture of experts, and its width for one token."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts or not _is_mixture(config, layer):
        return 3 * hidden * intermediate + (2 * intermediate + hidden if config.get("mlp_bias") else 0), intermediate
    width = config.get("moe_intermediate_size") or intermediate
    shared = config.get("shared_expert_intermediate_size") or 0
    weights = experts * 3 * hidden * width + hidden * experts + 3 * hidden * shared + (hidden if shared else 0)
    return weights, config.get("num_experts_per_tok", 1) * width + shared


def _is_mixture(config: Mapping[str, int | list[int]], layer: int) -> bool:
    """Whether a layer of a mixture-of-experts model has experts: some keep a dense layer here and there."""
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    assert isinstance(dense, list)
    assert isinstance(step, int)
    return layer not in dense and (layer + 1) % step == 0
