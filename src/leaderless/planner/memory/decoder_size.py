"""Sizes of a decoder-only transformer on which memory and cost depend, and the shares that ranks have of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from leaderless.planner.layout import Layout
from leaderless.planner.memory.attention_kinds import AttentionKind
from leaderless.planner.memory.layer_parts import NO_RECURRENCE, Heads, IndexerSize, RecurrenceSize
from leaderless.planner.memory.layers import Linear, layers_of_stage, packed_bytes
from leaderless.planner.memory.vision_size import VisionSize

_PER_LAYER = (
    "num_adapter_parameters",
    "num_whole_adapter_parameters",
    "num_expert_adapter_parameters",
    "num_packed_parameters",
)
NEVER_QUADRATIC = 1 << 40
"""Length at which attention counts as much as matrix products where it never does."""


class LayerSize(NamedTuple):
    """Sizes of one layer of a model whose layers are not alike.

    Attributes:
        num_parameters: Weights.
        num_expert_parameters: Weights of its experts.
        intermediate_size: Width of its feed-forward part, over all experts that a token goes through; or 0.
        num_kept: Numbers of each token that it keeps for the backward pass, in the type of the model, besides what
            attention and feed-forward parts of all families keep.
        has_indexer: Whether it chooses keys.
        heads: Its heads of attention; None if they are those of the model.
    """

    num_parameters: int
    num_expert_parameters: int
    intermediate_size: int
    num_kept: int
    has_indexer: bool
    heads: Heads | None = None

    def part(self, tp: int, parts_of_experts: int) -> LayerSize:
        """Share of a rank that divides a layer by `tp`, and its experts into some parts."""
        others, experts = self.num_parameters - self.num_expert_parameters, self.num_expert_parameters
        own = -(-experts // parts_of_experts)
        return self._replace(
            num_parameters=own + -(-others // tp),
            num_expert_parameters=own,
            intermediate_size=-(-self.intermediate_size // tp),
            num_kept=-(-self.num_kept // tp),
            heads=self.heads.part(tp) if self.heads else None,
        )


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
    ranks along `tp` do not divide, and of others. The linear layers for text of a model with adapters are `linears`,
    and `num_packed_parameters` of their weights have 4 bits. Attention `is_plain` without windows, sinks, and keys that
    are made from latents; only then an engine has pages.

    Where not all layers attend to everything, `kinds` says how each does. Where they are not alike, `layers` has the
    sizes of each, and `intermediate_size` is the greatest of theirs; heads are those of the layer with the widest
    queries, keys and values. Those that read by recurrence have states of the
    sizes of `recurrence`. Engines that keep keys and values compressed have `num_latents` numbers for a token of a
    layer. An `indexer` chooses the keys to attend to. A layer has `num_norms` norms of its parts. Of the matrices in
    all layers that read text, `rows` has the number of weights, by the length of their rows.
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
    linears: Sequence[Linear] = ()
    num_packed_parameters: int = 0
    dropped_inputs: tuple[int, int] = (0, 0)
    num_experts: int = 0
    num_expert_parameters: int = 0
    num_chosen_experts: int = 0
    vision: VisionSize | None = None
    is_tied: bool = False
    is_plain: bool = True
    kinds: tuple[AttentionKind, ...] = ()
    layers: tuple[LayerSize, ...] = ()
    recurrence: RecurrenceSize = NO_RECURRENCE
    num_latents: int = 0
    indexer: IndexerSize | None = None
    num_norms: int = 2
    rows: Mapping[int, int] = field(default_factory=dict)

    def weight_bytes(self, width: int, block: int) -> int:
        """Bytes of all weights but adapters: `width` each, or packed in blocks, if that is not 0."""
        if not block:
            return self.num_parameters * width
        packed = self.num_packed_parameters
        return (self.num_parameters - packed) * width + packed_bytes(packed, block)

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
        linear, quadratic = 2 * (self.num_active_parameters - in_tower), 0
        # Beyond their windows, tokens take as much with each further token of a layer, and recurrence always does.
        linear += self.num_recurrent_layers * self.recurrence.num_operations
        for most, heads in zip(self.most_keys(), self.heads_of_layers(), strict=True):
            linear += 4 * heads.query_size * (most or 0)
            quadratic += heads.query_size * (most is None)
        if self.indexer is not None:
            quadratic += self.num_indexers * self.indexer.num_heads * self.indexer.head_dim // 2  # without results
        return max(1, linear // (2 * quadratic)) if quadratic else NEVER_QUADRATIC

    def most_keys(self) -> list[int | None]:
        """The most keys to which a token attends, in each layer that has attention; None for all."""
        chosen = self.indexer.num_chosen if self.indexer else None
        if not self.kinds:
            return [chosen] * self.num_layers
        return [kind.window or kind.chunk or chosen for kind in self.kinds if kind.has_attention]

    def most_kept(self) -> list[int | None]:
        """The most tokens of which keys and values are of use, in each layer that has attention; None for all."""
        if not self.kinds:
            return [None] * self.num_layers
        return [kind.window or kind.chunk for kind in self.kinds if kind.has_attention]

    def heads_of_layers(self) -> list[Heads]:
        """The heads of each layer that has attention."""
        if not self.layers:
            return [self.heads] * self.num_attention_layers
        layers = zip(self.layers, self.kinds, strict=True)
        return [layer.heads or self.heads for layer, kind in layers if kind.has_attention]

    @property
    def heads(self) -> Heads:
        """Heads of the widest layer."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.num_latents)

    @property
    def query_size(self) -> int:
        """Most numbers in the queries of a token, in one layer."""
        return self.heads.query_size

    @property
    def num_attention_layers(self) -> int:
        """Layers that attend, which have keys and values."""
        return sum(kind.has_attention for kind in self.kinds) if self.kinds else self.num_layers

    @property
    def num_recurrent_layers(self) -> int:
        """Layers that read by recurrence, which have states."""
        return sum(kind.is_recurrent for kind in self.kinds)

    @property
    def num_mixtures(self) -> int:
        """Layers with experts."""
        return sum(layer.num_expert_parameters > 0 for layer in self.layers) if self.layers else self.num_layers

    @property
    def num_indexers(self) -> int:
        """Layers that choose keys."""
        return sum(layer.has_indexer for layer in self.layers)

    def state_bytes(self, width: int) -> int:
        """Bytes of the states of a sequence in all layers, in a model whose numbers have `width` bytes."""
        return self.num_recurrent_layers * self.recurrence.state_bytes(width)

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
    def kv_values_per_layer(self) -> int:
        """Numbers in the keys and values of one token in the widest layer that attends."""
        return self.heads.kv_values

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the keys and values of one token in all layers that attend, also of those that forget it later."""
        return sum(heads.kv_values for heads in self.heads_of_layers()) + self.index_values

    @property
    def compressed_values_per_token(self) -> int:
        """Numbers of one token in an engine that keeps latents, where there are some, and not keys and values."""
        if not self.num_latents:
            return self.kv_values_per_token
        return self.num_attention_layers * self.num_latents + self.index_values

    @property
    def index_values(self) -> int:
        """Numbers of one token by which later tokens choose keys."""
        return self.num_indexers * self.indexer.head_dim if self.indexer else 0

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
            num_packed_parameters=-(-self.num_packed_parameters // tp),
            dropped_inputs=(self.dropped_inputs[0], -(-self.dropped_inputs[1] // tp)),
            intermediate_size=-(-self.intermediate_size // tp),
            vocab_size=self.vocab_size // tp if is_divided else self.vocab_size,
            num_heads=-(-self.num_heads // tp),
            num_kv_heads=-(-self.num_kv_heads // tp),
            num_expert_parameters=experts,
            layers=tuple(layer.part(tp, tp if ep == 1 else ep) for layer in self.layers),
        )

    def stage(self, pp: int, stage: int) -> ModelSize:
        """Share of a stage of a pipeline: some layers, and the first one the embeddings, the last one the head.

        The first one has the part that sees, too. Where the head is the embedding, both of these stages have it.
        """
        if pp == 1:
            return self
        places, words = layers_of_stage(self.num_layers, pp, stage), self.vocab_size * self.hidden_size
        num_layers, own = len(places), self.layers[places.start : places.stop]
        per_layer = (self.num_layer_parameters - self._num_seeing) // self.num_layers  # on average
        experts = self.num_expert_parameters * num_layers // self.num_layers
        layers = per_layer * num_layers
        if own:
            layers, experts = (sum(getattr(layer, name) for layer in own) for name in LayerSize._fields[:2])
        layers += self._num_seeing * (stage == 0)
        behind = self.num_root_parameters - words * (not self.is_tied)
        root = words * (stage == 0) + behind * (stage == pp - 1)
        return replace(
            self,
            num_parameters=layers + root,
            num_layer_parameters=layers,
            num_layers=num_layers,
            kinds=self.kinds[places.start : places.stop],
            layers=own,
            intermediate_size=max((layer.intermediate_size for layer in own), default=self.intermediate_size),
            num_expert_parameters=experts,
            vision=self.vision if stage == 0 else None,
            **{name: -(-getattr(self, name) * num_layers // self.num_layers) for name in _PER_LAYER},
        )

    def num_kv_parts(self, layout: Layout) -> int:
        """Parts into which an engine divides the keys and values of a token; it divides no head, and no latents."""
        return min(layout.tp, 1 if self.num_latents else self.num_kv_heads) * layout.pp * layout.cp
