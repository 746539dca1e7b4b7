"""Layers of families in which not all are alike, from the description of a model. Imports no torch.

A family is a row of a table: how its layers attend, which of them read by recurrence, and where it has experts. All
else follows from settings, which have the same names in all families once they are renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from leaderless.planner.memory import gemma4_layers
from leaderless.planner.memory.attention_kinds import (
    FULL_LAYER,
    RECURRENT_LAYERS,
    SINGLE_TOKEN_LAYERS,
    WINDOW_LAYER,
    AttentionKind,
    attention_kinds,
)
from leaderless.planner.memory.layer_parts import (
    NO_RECURRENCE,
    Described,
    Heads,
    IndexerSize,
    LayerPart,
    RecurrenceSize,
    StateSpace,
    delta_net,
    grouped_attention,
    grouped_heads,
    indexer,
    indexer_size,
    kimi_delta_attention,
    latent_attention,
    latent_heads,
    short_convolution,
    state_space,
)
from leaderless.planner.memory.layers import Linear

LINEAR_LAYER, CONVOLUTION_LAYER = RECURRENT_LAYERS
DENSE_LAYER, EXPERT_LAYER = SINGLE_TOKEN_LAYERS
_GEMMAS4 = {"gemma4_text", "gemma4_unified_text"}
HYBRID_LAYER, INDEXED_LAYER = "hybrid", "indexed_attention"
Recurrence = Literal["", "delta_net", "joined_delta_net", "kimi_delta_attention", "state_space", "convolution"]

_OTHER_NAMES = {
    "layers_block_type": "layer_types",
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "top_k_experts": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "tie_embedding": "tie_word_embeddings",
    "block_ff_dim": "intermediate_size",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "chunk_size": "mamba_chunk_size",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
"""Names that some families have for settings, and the usual ones."""
_EARLIER_TYPES = {"mamba": LINEAR_LAYER, "attention": FULL_LAYER, "deepseek_sparse_attention": INDEXED_LAYER}
"""Types of layers as earlier files name them."""
_PATTERN = {"M": LINEAR_LAYER, "E": EXPERT_LAYER, "*": FULL_LAYER, "-": DENSE_LAYER}
"""Types of layers as the pattern of Nemotron-H has them."""
GATED = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of a gated feed-forward part."""


@dataclass(frozen=True)
class FamilyLayers:
    """Layers of a family.

    Attributes:
        attention: Names of attention and of its last projection in a layer.
        recurrent: Name, in a layer, of what reads by recurrence.
        feed_forward: Name of the feed-forward part in a layer, and names of its linear layers.
        shared: Name of the experts in a mixture through which all tokens go.
        is_latent: Whether keys and values are made from latents.
        head_norms: Whether single heads have norms of queries and keys, or all heads together, or none.
        has_gate: Whether the results of attention have a gate.
        has_sinks: Whether each head has a sink.
        has_bias: Whether projections of attention have biases; None if a setting says so.
        recurrence: Kind of layers that read by recurrence.
        num_norms: Norms of what enters and leaves the parts of a layer.
        has_both_parts: Whether each layer has a feed-forward part; else it mixes tokens or has one.
        is_gated: Whether feed-forward parts have a gate.
        has_expert_biases: Whether experts and what chooses them have biases.
        period: Distance of layers with full attention from each other, where files do not say; with 0, all have it.
        unsaid: Settings as `transformers` has them where files do not say.
    """

    attention: tuple[str, str] = ("self_attn", "o_proj")
    recurrent: str = ""
    feed_forward: tuple[str, tuple[str, ...]] = ("mlp", GATED)
    shared: str = "shared_experts"
    is_latent: bool = False
    head_norms: Literal["", "head", "all"] = ""
    has_gate: bool = False
    has_sinks: bool = False
    has_bias: bool | None = None
    recurrence: Recurrence = ""
    num_norms: int = 2
    has_both_parts: bool = True
    is_gated: bool = True
    has_expert_biases: bool = False
    period: int = 0
    unsaid: Mapping[str, object] = field(default_factory=dict)


_DELTA_NET = FamilyLayers(
    recurrent="linear_attn", shared="shared_expert", head_norms="head", has_gate=True, recurrence="delta_net", period=4
)
_LATENT = FamilyLayers(is_latent=True, unsaid={"n_shared_experts": 1, "first_k_dense_replace": 3})
_MAMBA = FamilyLayers(
    recurrent="mamba",
    feed_forward=("feed_forward", GATED),
    recurrence="state_space",
    unsaid={"mamba_conv_bias": True, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
)
_LFM = FamilyLayers(
    attention=("self_attn", "out_proj"),
    recurrent="conv",
    feed_forward=("feed_forward", ("w1", "w3", "w2")),
    head_norms="head",
    has_bias=False,
    recurrence="convolution",
    unsaid={"tie_word_embeddings": True, "conv_L_cache": 3, "num_key_value_heads": 8},
)
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA4 = FamilyLayers(
    num_norms=4,
    head_norms="head",
    period=6,
    unsaid=_GEMMA | {"sliding_window": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
)
FAMILY_LAYERS: Mapping[str, FamilyLayers] = {
    "bamba": replace(_MAMBA, unsaid={**_MAMBA.unsaid, "num_key_value_heads": 8}),
    "cohere2": FamilyLayers(num_norms=1, period=4, unsaid={"tie_word_embeddings": True}),
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "exaone4": FamilyLayers(head_norms="head", has_bias=False, period=4),
    "falcon_h1": replace(
        _MAMBA, unsaid={**_MAMBA.unsaid, "num_key_value_heads": 8, "mamba_rms_norm": False, "projectors_bias": False}
    ),
    "gemma2": FamilyLayers(num_norms=4, period=2, unsaid=_GEMMA | {"attn_logit_softcapping": 50.0}),
    "gemma3_text": FamilyLayers(num_norms=4, head_norms="head", period=6, unsaid=_GEMMA),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4, unsaid={**_GEMMA4.unsaid, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
    ),
    "glm_moe_dsa": _LATENT,
    "gpt_oss": FamilyLayers(
        has_sinks=True, has_expert_biases=True, period=2, unsaid={"attention_bias": True, "head_dim": 64}
    ),
    "granitemoehybrid": replace(_MAMBA, feed_forward=("shared_mlp", ("input_linear", "output_linear"))),
    "kimi_linear": replace(
        _LATENT,
        recurrent="self_attn",
        recurrence="kimi_delta_attention",
        unsaid={"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "lfm2": replace(_LFM, unsaid={**_LFM.unsaid, "block_multiple_of": 256}),
    "lfm2_moe": replace(_LFM, unsaid={**_LFM.unsaid, "first_k_dense_replace": 2}),
    "ministral": FamilyLayers(has_bias=False),
    "ministral3": FamilyLayers(has_bias=False, unsaid={"head_dim": 128}),
    "nemotron_h": replace(
        _MAMBA,
        attention=("mixer", "o_proj"),
        recurrent="mixer",
        feed_forward=("mixer", ("up_proj", "down_proj")),
        has_bias=False,
        num_norms=1,
        has_both_parts=False,
        is_gated=False,
        unsaid={**_MAMBA.unsaid, "head_dim": 128, "mamba_n_groups": 8},
    ),
    "olmo3": FamilyLayers(head_norms="all", period=4),
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": replace(_DELTA_NET, recurrence="joined_delta_net"),
}
"""Families by the `model_type` of their descriptions."""
WITH_TEXT_PART = {
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Families whose descriptions have that of the part that reads text in them, and the family of this part."""
_LOADED_WHOLE = {"gemma4", "gemma4_unified"}
"""Those of which other parts are loaded, too, and do nothing."""


class UnlikeLayers(NamedTuple):
    """Layers of a model.

    Attributes:
        parts: Parts of each layer, together.
        kinds: Kind of attention of each.
        has_indexer: Whether each of them chooses keys itself.
        heads: Heads of attention of each.
        recurrence: Sizes of each layer that reads by recurrence.
        indexer: Sizes of what chooses keys; None if tokens attend to all.
        besides: Parts of the model next to them, without embeddings of words, head and last norm.
        prefix: Beginning of the names of all of these.
    """

    parts: tuple[LayerPart, ...]
    kinds: tuple[AttentionKind, ...]
    has_indexer: tuple[bool, ...]
    heads: tuple[Heads, ...]
    recurrence: RecurrenceSize
    indexer: IndexerSize | None
    besides: LayerPart = LayerPart()
    prefix: str = "model."


def usual_names(config: Mapping[str, object]) -> dict[str, object]:
    """The description of a model of one of these families, or of its text part, with the usual names of settings.

    Raises:
        LookupError: A setting is missing.
        TypeError: The part that reads text is not described.
        ValueError: A setting is no number.
    """
    family = str(config["model_type"])
    if family in WITH_TEXT_PART:
        own = config.get("text_config", config)
        if not isinstance(own, dict):
            raise TypeError(f"text_config is {own}")
        others = {name: value for name, value in config.items() if name.endswith("_config") and name != "text_config"}
        whole = {**others, "is_part": own is not config} if family in _LOADED_WHOLE else {}
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **own, **whole}
        family = WITH_TEXT_PART[family]
    said = {name: value for name, value in config.items() if value is not None}
    found: dict[str, object] = {**FAMILY_LAYERS[family].unsaid, **said, "model_type": family}
    found |= {usual: said[name] for name, usual in _OTHER_NAMES.items() if name in said}
    if isinstance(own := said.get("linear_attn_config"), dict):  # as published with Kimi Linear
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        found |= {usual: own[name] for name, usual in names.items() if name in own}
    if "indexer_types" not in found and "index_topk" in found:
        found["indexer_types"] = _indexer_types(Described(found))
    found["layer_types"] = types = _layer_types(family, Described(found))
    if family in _GEMMAS4:
        types[-1] = FULL_LAYER
        found["per_layer_config"] = gemma4_layers.own_settings(Described(found))
        if not found.get("enable_moe_block"):
            found["num_experts"] = 0
    return found | ({"num_hidden_layers": len(types)} if types else {})


def _indexer_types(described: Described) -> list[str]:
    """Whether each layer chooses keys, or has those of the layer before it: by a pattern, or at some distance."""
    if described.has("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(one, one) for one in described.names("index_topk_pattern")]
    every, offset = max(1, described.count("index_topk_freq", 1)), described.count("index_skip_topk_offset", 2)
    layers = range(described.count("num_hidden_layers"))
    return ["shared" if max(0, layer - offset + 1) % every else "full" for layer in layers]


def _layer_types(family: str, described: Described) -> list[str]:
    """The types of the layers; empty if a window, or its absence, says the same about all of them."""
    if types := described.names("layer_types"):
        return [_EARLIER_TYPES.get(one, one) for one in types]
    if described.has("hybrid_override_pattern"):
        return [_PATTERN[one] for one in str(described.settings["hybrid_override_pattern"])]
    layers, row = range(described.count("num_hidden_layers")), FAMILY_LAYERS[family]
    if family == "falcon_h1":
        return [HYBRID_LAYER for _ in layers]
    if row.recurrence == "state_space":
        full = described.numbers("attn_layer_indices")
        return [FULL_LAYER if layer in full else LINEAR_LAYER for layer in layers]
    if row.recurrence == "convolution":
        full = described.numbers("full_attn_idxs") or [*layers]
        return [FULL_LAYER if layer in full else CONVOLUTION_LAYER for layer in layers]
    if row.recurrence == "kimi_delta_attention":
        own = described.settings.get("linear_attn_config")
        full = Described(own).numbers("full_attn_layers") if isinstance(own, dict) else [*range(5, len(layers) + 1, 4)]
        return [FULL_LAYER if layer + 1 in full else LINEAR_LAYER for layer in layers]
    if not row.period or not (row.recurrence or described.has("sliding_window")):
        return []
    period = described.count("sliding_window_pattern", described.count("full_attention_interval", row.period))
    other = LINEAR_LAYER if row.recurrence else WINDOW_LAYER
    return [other if (layer + 1) % period else FULL_LAYER for layer in layers]


def unlike_layers(config: Mapping[str, object]) -> UnlikeLayers:
    """The layers that a description has, whose settings have their usual names.

    Raises:
        LookupError: A setting is missing, or does not name all layers.
        ValueError: A layer is of a type that is not known.
    """
    described, family = Described(config), str(config["model_type"])
    row, types = FAMILY_LAYERS[family], Described(config).names("layer_types")
    known = [FULL_LAYER if one == INDEXED_LAYER else one for one in types]
    kinds = attention_kinds({**config, "layer_types": known})
    recurrent, recurrence = _recurrent_part(described, row) if row.recurrence else (LayerPart(), NO_RECURRENCE)
    chooses = described.has("index_topk")
    chosen = described.names("indexer_types") if chooses else ["shared"] * len(kinds)
    has_indexer = tuple(one == "full" for one in chosen)
    norms = LayerPart(num_others=row.num_norms * described.count("hidden_size"))
    layers, parts = [described.layer(number) for number in range(len(kinds))], list[LayerPart]()
    for layer, kind in enumerate(kinds):
        part = norms
        if kind.has_attention:
            part = part.joined(_attention_part(layers[layer], row, layer))
        if kind.is_recurrent:
            part = part.joined(recurrent)
        if has_indexer[layer]:
            part = part.joined(indexer(described, row.attention[0]))
        name = types[layer] if types else FULL_LAYER
        if row.has_both_parts or name in SINGLE_TOKEN_LAYERS:
            part = part.joined(_feed_forward_part(described, row, layer, name))
        parts.append(part)
    heads = tuple(latent_heads(one) if row.is_latent else grouped_heads(one) for one in layers)
    size = indexer_size(described) if chooses else None
    found = UnlikeLayers((*parts,), kinds, has_indexer, heads, recurrence, size)
    if family not in _GEMMAS4:
        return found
    besides, prefix = gemma4_layers.besides_layers(described), "model." + "language_model." * described.flag("is_part")
    return found._replace(besides=besides, prefix=prefix)


def _attention_part(described: Described, row: FamilyLayers, layer: int) -> LayerPart:
    name, out = row.attention
    if row.is_latent:
        return latent_attention(described, name)
    if described.settings["model_type"] in _GEMMAS4:
        return gemma4_layers.attention(described, layer, name, out)
    heads = grouped_heads(described)
    has_bias = described.flag("attention_bias") if row.has_bias is None else row.has_bias
    norms = {"": 0, "head": 2, "all": heads.num_heads + heads.num_kv_heads}[row.head_norms] * heads.head_dim
    own = LayerPart(num_others=norms + heads.num_heads * row.has_sinks)
    return grouped_attention(described, name, out, has_bias=has_bias, has_gate=row.has_gate).joined(own)


def _recurrent_part(described: Described, row: FamilyLayers) -> tuple[LayerPart, RecurrenceSize]:
    name = row.recurrent
    if row.recurrence in {"delta_net", "joined_delta_net"}:
        return delta_net(described, name, is_joined=row.recurrence == "joined_delta_net")
    if row.recurrence == "kimi_delta_attention":
        return kimi_delta_attention(described, name)
    if row.recurrence == "convolution":
        return short_convolution(described, name)
    num_heads, head_dim = described.count("mamba_n_heads"), described.settings.get("mamba_d_head", "auto")
    if not isinstance(head_dim, int):
        head_dim = described.count("mamba_d_ssm", described.count("mamba_expand") * described.count("hidden_size"))
        head_dim //= num_heads
    others = (described.count(f"mamba_{one}") for one in ("d_state", "n_groups", "d_conv", "chunk_size"))
    is_projected = described.flag("mamba_proj_bias")
    biases = described.flag("mamba_conv_bias"), is_projected, described.flag("projectors_bias", default=is_projected)
    has_norm = described.flag("mamba_rms_norm", default=True)
    return state_space(described, name, StateSpace(num_heads, head_dim, *others), biases=biases, has_norm=has_norm)


def _feed_forward_part(described: Described, row: FamilyLayers, layer: int, name: str) -> LayerPart:
    """A dense part, or a mixture of experts; one family has both in each layer."""
    experts = _has_experts(described, layer, name)
    if described.has("shared_intermediate_size"):
        dense = _dense(described, row, row.feed_forward[0], described.count("shared_intermediate_size"))
        return dense.joined(_experts(described, row)) if experts else dense
    if described.settings["model_type"] in _GEMMAS4:
        is_double = described.flag("use_double_wide_mlp") and gemma4_layers.takes_keys(described, layer)
        dense = _dense(described, row, row.feed_forward[0], _inner_size(described) * (2 if is_double else 1))
        whole = dense.joined(gemma4_layers.additions(described))
        return whole.joined(_experts(described, row, has_router=False)) if experts else whole
    return _experts(described, row) if experts else _dense(described, row, row.feed_forward[0], _inner_size(described))


def _has_experts(described: Described, layer: int, name: str) -> bool:
    if not described.count("num_experts", 0):
        return False
    if name in SINGLE_TOKEN_LAYERS:
        return name == EXPERT_LAYER
    if kinds := described.names("mlp_layer_types"):
        return kinds[layer] == "sparse"
    is_dense = layer < described.count("first_k_dense_replace", 0) or layer in described.numbers("mlp_only_layers")
    return not is_dense and (layer + 1) % described.count("decoder_sparse_step", 1) == 0


def _inner_size(described: Described) -> int:
    """The width of dense parts; LFM2 has two thirds of what its files say, rounded up."""
    inner = described.count("intermediate_size")
    if described.has("block_multiple_of") and described.flag("block_auto_adjust_ff_dim", default=True):
        multiple, factor = described.count("block_multiple_of"), described.settings.get("block_ffn_dim_multiplier", 1.0)
        assert isinstance(factor, int | float)
        inner = -(-int(factor * int(2 * inner / 3)) // multiple) * multiple
    return inner


def _dense(described: Described, row: FamilyLayers, name: str, inner: int) -> LayerPart:
    hidden, (*first, last) = described.count("hidden_size"), row.feed_forward[1]
    made = inner * (2 if row.is_gated else 1)  # by one linear layer or by two
    linears = [Linear(f"{name}.{one}", hidden, made // len(first)) for one in first]
    biases = (made + hidden) * described.flag("mlp_bias")
    return LayerPart((*linears, Linear(f"{name}.{last}", inner, hidden)), biases, inner_size=inner)


def _experts(described: Described, row: FamilyLayers, *, has_router: bool = True) -> LayerPart:
    """Experts with what chooses them, and one through which all tokens go; some work on a projection of tokens."""
    hidden, count, name = described.count("hidden_size"), described.count("num_experts"), row.feed_forward[0]
    width = described.count("moe_intermediate_size", described.count("intermediate_size", 0))
    outer = described.count("moe_latent_size", hidden)
    each = (3 if row.is_gated else 2) * outer * width + (2 * width + outer) * row.has_expert_biases
    others = count * (each + hidden * has_router + row.has_expert_biases)
    part = LayerPart((), others, count * each, described.count("num_experts_per_tok") * width)
    if outer != hidden:
        pair = Linear(f"{name}.fc1_latent_proj", hidden, outer), Linear(f"{name}.fc2_latent_proj", outer, hidden)
        part = part.joined(LayerPart(pair, (outer + hidden) * described.flag("mlp_bias")))
    shared = described.count("shared_expert_intermediate_size", described.count("n_shared_experts", 0) * width)
    if not shared:
        return part
    if row.shared == "shared_expert":
        part = part.joined(LayerPart((Linear(f"{name}.shared_expert_gate", hidden, 1),)))
    return part.joined(_dense(described, row, f"{name}.{row.shared}", shared))
