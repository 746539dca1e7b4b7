"""What Gemma 4 has besides the layers of other families. Imports no torch.

Layers that see all tokens have heads of their own, the last layers take keys and values of earlier ones, each may add
an embedding of its own, and experts work next to a dense part. Published files come with parts that see and hear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from leaderless.planner.memory.attention_kinds import FULL_LAYER
from leaderless.planner.memory.layer_parts import Described, LayerPart, grouped_attention, grouped_heads
from leaderless.planner.memory.layers import Linear

_TOWERS = ("vision_config", "audio_config")


def own_settings(described: Described) -> dict[int, Mapping[str, object]]:
    """Settings that single layers have of their own, by layer."""
    if isinstance(own := described.settings.get("per_layer_config"), dict):
        return {int(layer): settings for layer, settings in own.items()}
    full: dict[str, object] = {"head_dim": described.count("global_head_dim", 512)}
    if described.flag("attention_k_eq_v") and described.has("num_global_key_value_heads"):
        full["num_key_value_heads"] = described.count("num_global_key_value_heads")
    return {layer: full for layer, kind in enumerate(described.names("layer_types")) if kind == FULL_LAYER}


def attention(described: Described, layer: int, name: str, out: str) -> LayerPart:
    """Projections of attention; values may be keys, and layers that take both from others make none.

    Args:
        described: Description of the model, with the settings that the layer has of its own.
        layer: Number of the layer.
        name: Name of attention in the layer.
        out: Name of its last projection.
    """
    part = grouped_attention(described, name, out, has_bias=described.flag("attention_bias"), has_gate=False)
    heads = grouped_heads(described)
    missing = set[str]()
    if takes_keys(described, layer):
        missing = {f"{name}.k_proj", f"{name}.v_proj"}
    elif described.flag("attention_k_eq_v") and described.names("layer_types")[layer] == FULL_LAYER:
        missing = {f"{name}.v_proj"}
    biases = (heads.kv_values // 2) * len(missing) * described.flag("attention_bias")
    norms = heads.head_dim * (1 if takes_keys(described, layer) else 2)
    linears = tuple(linear for linear in part.linears if linear.name not in missing)
    return LayerPart(linears, part.num_others - biases + norms)


def takes_keys(described: Described, layer: int) -> bool:
    """Whether a layer takes keys and values of an earlier one."""
    return layer >= described.count("num_hidden_layers") - described.count("num_kv_shared_layers", 0)


def additions(described: Described) -> LayerPart:
    """What each layer has besides attention and a dense part: norms and a gate of an embedding, norms of experts."""
    hidden, width, part = described.count("hidden_size"), described.count("hidden_size_per_layer_input"), LayerPart()
    if width:
        linears = Linear("per_layer_input_gate", hidden, width), Linear("per_layer_projection", width, hidden)
        part = LayerPart(linears, hidden, num_kept=4 * width + 3 * hidden)
    if experts := described.count("num_experts", 0):
        router = LayerPart((Linear("router.proj", hidden, experts),), 4 * hidden + experts, num_kept=12 * hidden)
        part = part.joined(router)
    return part


def besides_layers(described: Described) -> LayerPart:
    """Embeddings that layers add, by their names next to the layers, and the parts that see and hear."""
    hidden, width = described.count("hidden_size"), described.count("hidden_size_per_layer_input")
    part = LayerPart(num_others=sum(_tower(described, name) for name in _TOWERS))
    if not width:
        return part
    inputs = width * described.count("num_hidden_layers")
    words = described.count("vocab_size_per_layer_input") * inputs
    return part.joined(LayerPart((Linear("per_layer_model_projection", hidden, inputs),), words + width))


def _tower(described: Described, name: str) -> int:
    """Weights of a part that sees or hears, with the projection of its results; 0 where there is none."""
    if not described.has(name):
        return 0
    own = Described(cast("Mapping[str, object]", described.settings[name]))
    hidden, count, text = own.count("hidden_size"), own.count("num_hidden_layers"), described.count("hidden_size")
    if name == "vision_config":
        heads = grouped_heads(own)
        layer = 2 * hidden * heads.query_size + hidden * heads.kv_values + 2 * heads.head_dim
        layer += 3 * hidden * own.count("intermediate_size") + 4 * hidden
        pixels = 3 * own.count("patch_size") ** 2
        return count * layer + hidden * (2 * own.count("position_embedding_size") + pixels + text)
    first, second = own.numbers("subsampling_conv_channels")
    layer = 16 * hidden**2 + 4 * hidden  # two dense parts
    layer += 5 * hidden**2 + hidden // own.count("num_attention_heads")  # attention
    layer += (3 * hidden + own.count("conv_kernel_size") + 2) * hidden + 3 * hidden  # a convolution, and norms
    results = own.count("output_proj_dims")
    before = 9 * first + first + 9 * first * second + second + first // 4 * second * hidden
    return count * layer + before + (hidden + 1) * results + results * text
