"""The size of a model from its `config.json`, without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from leaderless.base.errors import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.planner.graph.adapters import lora_of
from leaderless.planner.layout import Layout
from leaderless.planner.memory.attention_kinds import FULL, attention_kinds
from leaderless.planner.memory.layers import (
    TEXT_PART,
    Linear,
    decoder_layers,
    layers_of_stage,
    num_adapter_weights,
    widest_inputs,
    with_adapters,
)
from leaderless.planner.memory.vision_size import TEXT, VisionSize, text_config, vision_tower

QKV_BIAS = {"qwen2", "qwen2_moe"}
"""Families with biases in queries, keys and values, whatever their configuration says."""
NO_BIAS = {"mistral", "mixtral", "phi3"}
"""Families without biases in attention, whatever their configuration says."""
TIED_UNLESS_SAID = {"gemma", "smollm3"}
"""Families whose output embedding is the input embedding when their configuration does not say."""
FAMILIES = QKV_BIAS | NO_BIAS | TIED_UNLESS_SAID | {"granite", "llama", "qwen3", "qwen3_moe"}
"""Families whose weights are counted, as the configuration's `model_type` calls them."""

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
_OF_ADAPTERS = ("num_adapter_parameters", "num_whole_adapter_parameters", "num_expert_adapter_parameters")


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder-only transformer on which memory and cost depend.

    Tied weights are counted once. The weights of all layers are `num_layer_parameters`; the others are embeddings, head
    and last norm. `intermediate_size` is the width of the feed-forward layer that a token goes through, over all of its
    experts. The longest sequence has `max_positions` tokens. Adapters add `num_adapter_parameters`, of which ranks that
    divide layers have `num_whole_adapter_parameters` each; experts' adapters have `num_expert_adapter_parameters`. Of
    the weights, `num_expert_parameters` belong to the `num_experts` of all layers; a token goes through
    `num_chosen_experts` in each. In a model that sees images, layers include the layers of `vision`. The head is the
    input embedding if it `is_tied`. The layers of the whole model with adapters, linear ones and experts, are
    `adapted`. Where adapters drop some of their inputs, the widest have `dropped_inputs`: of the layers whose inputs
    ranks along `tp` do not divide, and of others. Attention `is_plain` without windows; only then an engine has pages.
    """

    num_parameters: int
    num_layer_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_head_norms: bool
    max_positions: int
    num_adapter_parameters: int = 0
    num_whole_adapter_parameters: int = 0
    num_expert_adapter_parameters: int = 0
    adapted: Sequence[str] = ()
    dropped_inputs: tuple[int, int] = (0, 0)
    num_experts: int = 0
    num_expert_parameters: int = 0
    num_chosen_experts: int = 0
    vision: VisionSize | None = None
    is_tied: bool = False
    is_plain: bool = True

    @property
    def num_trained(self) -> int:
        """Weights that training changes."""
        frozen = self.vision.num_frozen if self.vision else 0
        return self.num_adapter_parameters or self.num_parameters - frozen

    @property
    def num_active_parameters(self) -> int:
        """Weights that a token goes through: of the experts those that are chosen for it."""
        idle = self.num_experts - self.num_chosen_experts
        return self.num_parameters - (self.num_expert_parameters * idle // self.num_experts if self.num_experts else 0)

    @property
    def quadratic_tokens(self) -> int:
        """Length of a sequence whose attention takes as many operations as all matrix products of its tokens.

        A token takes two operations per weight. With causal attention, a sequence takes two per layer, number in the
        queries of a token and pair of tokens: four for each pair that is computed, and half of the pairs are.
        """
        in_tower = self.vision.num_parameters if self.vision else 0
        return max(1, (self.num_active_parameters - in_tower) // (self.num_layers * self.query_size))

    @property
    def query_size(self) -> int:
        """Numbers in the queries of a token, in one layer."""
        return self.num_heads * self.head_dim

    def num_gathered(self, layout: Layout) -> int:
        """Weights that a rank of a layout gathers in a pass from those with the same part: without divided experts.

        Of stages of a pipeline, it is the average.
        """
        part = self.part(layout.tp)
        divided = part.num_expert_parameters if layout.ep > 1 else 0
        return -(-(part.num_parameters - divided) // layout.pp)

    def num_gathered_experts(self, layout: Layout) -> int:
        """Weights of divided experts that a rank gathers in a pass from those with the same ones; as `num_gathered`."""
        if layout.ep == 1 or layout.num_copies == 1:
            return 0
        return -(-self.num_expert_parameters // (layout.ep * layout.pp))

    @property
    def num_root_parameters(self) -> int:
        """Weights that belong to no layer: embeddings, head and last norm."""
        return self.num_parameters - self.num_layer_parameters

    @property
    def _num_seeing(self) -> int:
        """Weights of the part that sees."""
        return self.vision.num_parameters if self.vision else 0

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def part(self, tp: int, ep: int = 1) -> ModelSize:
        """Share of a rank that divides the layers with others, and the words, if their number allows it.

        Each rank has all of the part that sees. Experts are divided by `tp`, or by `ep` if it is more than 1.
        """
        if tp * ep == 1:
            return self
        sight, experts = self._num_seeing, -(-self.num_expert_parameters // (tp if ep == 1 else ep))
        layers = sight + experts + -(-(self.num_layer_parameters - sight - self.num_expert_parameters) // tp)
        whole = self.num_whole_adapter_parameters
        is_divided = self.vocab_size % tp == 0
        root = -(-self.num_root_parameters // tp) if is_divided else self.num_root_parameters
        return replace(
            self,
            num_parameters=layers + root,
            num_layer_parameters=layers,
            num_adapter_parameters=whole - (whole - self.num_adapter_parameters) // tp,
            num_expert_adapter_parameters=-(-self.num_expert_adapter_parameters // tp),
            dropped_inputs=(self.dropped_inputs[0], -(-self.dropped_inputs[1] // tp)),
            intermediate_size=-(-self.intermediate_size // tp),
            vocab_size=self.vocab_size // tp if is_divided else self.vocab_size,
            num_heads=-(-self.num_heads // tp),
            num_kv_heads=-(-self.num_kv_heads // tp),
            num_expert_parameters=experts,
        )

    def stage(self, pp: int, stage: int) -> ModelSize:
        """Share of a stage of a pipeline: some layers, and the first one the embeddings, the last one the head.

        The first one has the part that sees, too. Where the head is the embedding, both of these stages have it.
        """
        if pp == 1:
            return self
        num_layers, words = len(layers_of_stage(self.num_layers, pp, stage)), self.vocab_size * self.hidden_size
        per_layer = (self.num_layer_parameters - self._num_seeing) // self.num_layers  # on average
        layers = per_layer * num_layers + self._num_seeing * (stage == 0)
        behind = self.num_root_parameters - words * (not self.is_tied)
        root = words * (stage == 0) + behind * (stage == pp - 1)
        return replace(
            self,
            num_parameters=layers + root,
            num_layer_parameters=layers,
            num_layers=num_layers,
            num_expert_parameters=self.num_expert_parameters * num_layers // self.num_layers,
            vision=self.vision if stage == 0 else None,
            **{name: -(-getattr(self, name) * num_layers // self.num_layers) for name in _OF_ADAPTERS},
        )

    def num_kv_parts(self, layout: Layout) -> int:
        """Parts into which an engine divides the keys and values of a token; a head is never divided."""
        return min(layout.tp, self.num_kv_heads) * layout.pp * layout.cp


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
        if not isinstance(config, dict) or str(config.get("model_type")) not in {*FAMILIES, *TEXT}:
            return None
        vision: VisionSize | None = None
        seen: Sequence[Linear] = ()
        if config["model_type"] in TEXT:
            vision, seen = vision_tower(config, is_frozen=model.freeze_vision)
            config = text_config(config)
        nothing = next((name for name in _COUNTS if int(config[name]) < 1), None)
        if nothing is None:
            size = _decoder_size(config, vision, is_critic=is_critic)
            return _with_adapters(size, config, seen, model, lora) if lora else size
    except (OSError, ValueError, KeyError, TypeError):
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
        is_plain=all(kind == FULL for kind in attention_kinds(described)),
        vision=vision,
    )


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
