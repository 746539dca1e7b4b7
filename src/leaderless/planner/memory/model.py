"""The memory of one model on a rank: weights, copies of them, and what passes keep of each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leaderless.config import Recipe
from leaderless.config.models import ModelConfig, Whole
from leaderless.config.rollout import RolloutConfig
from leaderless.planner.engines import RolloutEngineSpec, engine_for
from leaderless.planner.graph.adapters import companions_of, donor_of
from leaderless.planner.memory.attention_kinds import FULL
from leaderless.planner.memory.decoder_size import LayerSize, ModelSize
from leaderless.planner.memory.limits import MAX_WORDS
from leaderless.planner.memory.vision_size import NO_VISION, VisionSize
from leaderless.planner.plan_parts import RoleInstance

FLOAT32_BYTES = 4


def number_bytes(config: ModelConfig) -> int:
    """Bytes of a number as a model computes."""
    return 2 if config.compute_dtype == "bfloat16" else FLOAT32_BYTES


class PassMemory(NamedTuple):
    """A pass that trains or scores.

    Attributes:
        tokens: Tokens.
        number: Number of passes of its kind.
        copies: Tokens of prompts that are copied for siblings: attention reads each prompt once for each of them.
        sequences: Prompts and responses that attend; 0 where nothing is copied, as on a CPU.
        states: Prompts and responses of which layers that read by recurrence have states.
    """

    tokens: int
    number: int
    copies: int = 0
    sequences: int = 0
    states: int = 0


@dataclass(frozen=True)
class Guest:
    """Whether a model, and its engine, use the weights of another role's under adapters of their own."""

    trains: bool = False
    generates: bool = False

    @classmethod
    def of(cls, recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> Guest:
        """Whether this is so for an instance."""
        donor, companions = donor_of(recipe, instances, instance), companions_of(recipe, instances, instance)
        is_native = donor is not None and donor.generates and instance.engine == donor.engine == "native"
        is_seated = bool(companions) and companions[0].role != instance.role
        return cls(donor is not None and not instance.is_engine_only, is_native or is_seated)


@dataclass(frozen=True)
class ModelMemory:
    """A model with the bytes of a number as it computes, how many ranks divide its weights, and how it generates.

    Ranks along `tp` and `pp` have a part each, and others divide the weights of a part. `num_ahead` micro-batches are
    held at the same time, if there are as many: on each stage of a pipeline, as many as there are stages from it on.

    It generates if a node does so with it, or if it is evaluated. It is shared if it is another one without adapters.
    Of what ranks divide, `keeps` says what each keeps whole.
    """

    instance: RoleInstance
    size: ModelSize
    part: ModelSize
    num_ahead: int
    config: ModelConfig
    width: int
    shards: int
    sampling: RolloutConfig
    generates: bool
    is_shared: bool
    guest: Guest
    keeps: Whole = "nothing"

    @property
    def has_logits(self) -> bool:
        """Whether it computes logits."""
        return self.num_ahead == 1 and not self.instance.is_critic

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.config.lora is not None

    @property
    def is_beside(self) -> bool:
        """Whether its engine is next to the trainer."""
        return self.generates and not self.instance.is_engine_only

    @property
    def has_base_beside(self) -> bool:
        """Whether an engine next to the trainer has the weights once more, to which it adds adapters.

        An engine that keeps weights copies them to the host to sleep.
        """
        return self.is_beside and self.adds_adapters and not self.guest.generates

    @property
    def adds_adapters(self) -> bool:
        """Whether its engine adds adapters to weights that it reads itself, so that only they are sent."""
        return self.has_adapters and self.engine.takes_adapters

    def trained_bytes(self) -> int:
        """A rank's share of the weights that training changes."""
        return -(-self.part.num_trained * FLOAT32_BYTES // self.shards)

    def adapted_bytes(self) -> int:
        """Memory of an engine apart from the trainer's for adapters: a base of its own, or weights with these merged.

        The latter are copies of what a rank holds, and there while they are sent.
        """
        if not self.has_adapters:
            return 0
        if self.engine.takes_adapters:
            return self.size.num_parameters * self.width
        return -(-self.size.num_parameters * FLOAT32_BYTES // self.shards)

    @property
    def engine(self) -> RolloutEngineSpec:
        """The contract of its engine."""
        return engine_for(self.sampling, self.instance.engine)

    def sent_bytes(self) -> int:
        """Bytes of the weights that are sent to its engine."""
        return (self.size.num_trained if self.adds_adapters else self.size.num_parameters) * self.width

    def engine_bytes(self) -> int:
        """An engine's own weights on one of the ranks that it spans."""
        layout = self.instance.serving_layout
        return -(-self.size.num_parameters * self.width // (layout.tp * layout.pp))

    @property
    def num_gathered_per_layer(self) -> int:
        """Weights of a layer that are gathered at once: of divided experts those that other ranks have, too."""
        part, layout = self.part, self.instance.layout
        gathered = part.num_layer_parameters
        if layout.ep > 1:
            gathered += self._own_experts(part.num_layers) * (layout.num_copies > 1) - part.num_expert_parameters
        return gathered // part.num_layers

    def _own_experts(self, num_layers: int) -> int:
        """Weights of the divided experts that compute on a rank, in some layers; each of them is whole there."""
        return -(-self.size.num_expert_parameters * num_layers // (self.size.num_layers * self.instance.layout.ep))

    @property
    def is_plain(self) -> bool:
        """Whether a rank computes with its weights as it holds them: none are gathered or converted."""
        layout = self.instance.layout
        has_copies = 1 < layout.ep < layout.tp  # then ranks along `tp` divide the weights of the same experts
        is_stage = self.part.num_layers < self.size.num_layers  # which is sharded, if only over itself
        return self.shards == 1 and self.width == FLOAT32_BYTES and not (is_stage or has_copies)

    def gathered_bytes(self) -> int:
        """Copies that compute, where weights are sharded or of another type: two layers, and what is in no layer.

        All layers, if they are kept whole.
        """
        if self.is_plain:
            return 0
        num_layers = 2 if self.keeps == "nothing" else self.part.num_layers
        return (num_layers * self.num_gathered_per_layer + self.part.num_root_parameters) * self.width

    def gradient_bytes(self) -> int:
        """Gradients between two passes of an update: a rank's share, or what it has of them before ranks add them up.

        Of experts a rank has those alone that compute on it.
        """
        if self.keeps != "all" or self.is_plain:
            return self.trained_bytes()
        whole, part, ep = self.part.num_trained, self.part, self.instance.layout.ep
        if ep > 1 and self.has_adapters:
            own = -(-self.size.num_expert_adapter_parameters * part.num_layers // (self.size.num_layers * ep))
            whole += own - part.num_expert_adapter_parameters
        elif ep > 1:
            whole += self._own_experts(part.num_layers) - part.num_expert_parameters
        return max(self.trained_bytes(), whole * FLOAT32_BYTES)

    def converted_bytes(self, num_layers: int) -> int:
        """Copies in the type that computes of the experts that a rank alone keeps, in some layers."""
        layout = self.instance.layout
        if layout.ep == 1 or layout.num_copies > 1 or self.width == FLOAT32_BYTES:
            return 0
        return self._own_experts(num_layers) * self.width

    def layer_values(self) -> int:
        """Numbers that a layer keeps of each token for its backward pass: the most of all layers."""
        return max(self._values_of_layers())

    def _values_of_layers(self) -> Iterator[int]:
        """Numbers that each layer keeps of each token for its backward pass; all alike where layers are.

        A norm keeps its input, the normalized input before scaling, unless adapters are trained in place of its weight,
        and its output; in half precision the first of these is a copy in float32. Attention keeps queries, keys, values
        and its output, the feed-forward part its gate before and after the activation, the other factor and their
        product, and experts their tokens and results. What reads by recurrence keeps numbers in float32.
        """
        size, is_half = self.part, self.width != FLOAT32_BYTES
        # Queries with results, and keys with values.
        attention = 2 * (size.num_heads + size.num_kv_heads) * size.head_dim
        norms = size.num_norms * ((4 if is_half else 3) - self.has_adapters) * size.hidden_size
        in_heads = (3 if is_half else 2) * (size.num_heads + size.num_kv_heads) * size.head_dim * size.has_head_norms
        # A token is copied for each of its experts, and so are their results; both again where they are sent. Ranks
        # that have the same tokens send some of them each.
        layout = self.instance.layout
        copies = size.num_chosen_experts * (4 if layout.ep > 1 else 2) * size.hidden_size // layout.tp
        recurrent = -(-size.recurrence.num_kept * FLOAT32_BYTES // self.width)
        kinds, inner = size.kinds or (FULL,) * size.num_layers, size.intermediate_size
        alike = LayerSize(0, 1, inner, 0, has_indexer=False)
        for kind, layer in zip(kinds, size.layers or (alike,) * size.num_layers, strict=True):
            yield (
                norms
                + (attention + in_heads) * kind.has_attention
                + recurrent * kind.is_recurrent
                + layer.num_kept
                + 4 * layer.intermediate_size
                + copies * (layer.num_expert_parameters > 0)
            )

    def kept_values(self) -> int:
        """Numbers of each token that are held until the backward pass."""
        size = self.part
        if self.config.gradient_checkpointing:
            return size.num_layers * size.hidden_size
        return sum(self._values_of_layers())

    def held_values(self, size: ModelSize) -> int:
        """Numbers that a pass without a gradient holds of each token, through all of a model or through a part.

        They are in a feed-forward part or in a recurrence. In the former, these are the layer's input, what is added to
        it and its norm, and the gate, the other factor and their product. In plain torch, a recurrence holds as much at
        its peak as it would keep for a gradient, as measured.
        """
        inner = 3 * (size.intermediate_size + size.hidden_size)
        recurrent = 3 * size.hidden_size + size.recurrence.num_kept * FLOAT32_BYTES // self.width
        return max(inner, recurrent if size.num_recurrent_layers else 0)

    def state_bytes(self, work: PassMemory, *, num_layers: int | None = None) -> int:
        """Memory for the states of sequences in a pass, of some layers that read by recurrence, or of all."""
        each = self.part.recurrence.state_bytes(self.width)
        return work.states * each * (self.part.num_recurrent_layers if num_layers is None else num_layers)

    def copied_bytes(self, work: PassMemory) -> int:
        """Memory that a layer fills for its attention and keeps for its backward pass.

        These are keys and values of prompts, for each sibling. In float32 all tokens are laid out, and keys and values
        for each query head: queries, keys, values and results are kept so, and of the tokens themselves only the
        result.
        """
        if self.width == FLOAT32_BYTES and work.sequences:
            laid_out = (work.tokens + work.copies) * 4 * self.part.query_size
            return (laid_out - work.tokens * (self.part.query_size + self._key_values)) * FLOAT32_BYTES
        return work.copies * self._key_values * self.width

    def attention_bytes(self, work: PassMemory, *, is_begin: bool) -> int:
        """Memory for the backward pass of a layer's attention beyond what its feed-forward part has released.

        FlashAttention-2, as torch has it, adds up the gradients of queries in float32, with 128 rows more for each
        sequence, and computes the gradients of keys and values for each query head, if there are fewer key heads,
        before it adds these up. All others are in the type of the model. FlashAttention-3 needs less. The feed-forward
        part has released its four inner vectors of each token by then, and when the backward pass begins the three
        that it made.
        """
        if not work.sequences or self.width == FLOAT32_BYTES:
            return 0
        size, laid_out = self.part, work.tokens + work.copies
        queries = (work.tokens + 128 * work.sequences) * (size.query_size + size.num_heads) * FLOAT32_BYTES
        expanded = 2 * size.query_size * (size.num_heads != size.num_kv_heads)
        gradients = work.tokens * 2 * size.query_size + laid_out * (self._key_values + expanded)
        released = work.tokens * (7 if is_begin else 4) * size.intermediate_size
        return max(0, queries + (gradients - released) * self.width)

    @property
    def _key_values(self) -> int:
        """Numbers in the keys and values of a token in one layer."""
        return self.part.kv_values_per_layer

    def dropped_bytes(self, tokens: int) -> int:
        """Memory for the dropout of one layer's adapter, for some tokens.

        It holds whether each input is dropped, the inputs that are left, and random words that are drawn at once.
        """
        widest = max(self.part.dropped_inputs)
        return (tokens * widest * (1 + self.width) + 3 * 8 * MAX_WORDS) * (widest > 0)

    @property
    def vision(self) -> VisionSize:
        """The part that sees, of no size where there is none."""
        return self.part.vision or NO_VISION
