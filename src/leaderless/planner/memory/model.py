"""The memory of one model on a rank: weights, copies of them, and what passes keep of each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leaderless.config import Recipe
from leaderless.config.low_precision import LowPrecision, Part, formats_of
from leaderless.config.models import ModelConfig, Offload, OptimizerConfig, Whole
from leaderless.config.rollout import RolloutConfig
from leaderless.planner.engines import RolloutEngineSpec, backend_of, engine_for
from leaderless.planner.graph.adapters import base_of, companions_of, donor_of
from leaderless.planner.graph.judges import as_judged
from leaderless.planner.memory.attention_kinds import FULL
from leaderless.planner.memory.decoder_size import LayerSize, ModelSize
from leaderless.planner.memory.layer_parts import Heads
from leaderless.planner.memory.layers import packed_bytes
from leaderless.planner.memory.limits import MAX_WORDS, STATE_GROUP_BYTES, STATE_ROOMS
from leaderless.planner.memory.offload import where_frozen
from leaderless.planner.memory.optimizer_states import kept_by
from leaderless.planner.memory.vision_size import NO_VISION, VisionSize
from leaderless.planner.plan_parts import RoleInstance, answering

FLOAT32_BYTES = 4
INPUTS_MOVING = 2
"""Inputs of layers that are there at a time where they are offloaded: one in use, and one on its way."""
SCORES_OF_BLOCK = 1 << 24
"""Scores that attention by products of matrices computes at a time, at most."""


def number_bytes(config: ModelConfig) -> int:
    """Bytes of a number as a model computes."""
    return 2 if config.compute_dtype == "bfloat16" else FLOAT32_BYTES


class PassMemory(NamedTuple):
    """A pass that trains or scores.

    Attributes:
        tokens: Tokens.
        number: Number of passes of its kind.
        copies: Tokens that siblings share and attention copies, as it reads them once for each of these.
        sequences: Prompts and responses that attend; 0 where nothing is copied, as on a CPU.
        longest: Tokens of the longest prompt with a response.
        states: Prompts and responses of which layers that read by recurrence have states.
    """

    tokens: int
    number: int
    copies: int = 0
    sequences: int = 0
    longest: int = 0
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
    Of what ranks divide, `keeps` says what each keeps whole, and `sleeps` where weights are while they do not score.
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
    optimizer: OptimizerConfig
    keeps: Whole = "nothing"
    sleeps: Offload = "none"

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
        return self.is_beside and self.adds_adapters and not self.guest.generates and not self.engine.is_elsewhere

    @property
    def adds_adapters(self) -> bool:
        """Whether its engine adds adapters to weights that it reads itself, so that only they are sent."""
        return self.has_adapters and self.engine.takes_adapters

    @property
    def block(self) -> int:
        """Weights that share a scale where they have 4 bits; else 0."""
        return self.config.lora.packed_block if self.config.lora else 0

    def unpacked_bytes(self) -> int:
        """The largest weight of those with 4 bits, which is unpacked while it computes, and its numbers as they are."""
        if not self.block:
            return 0
        largest = max((one.inputs * one.outputs for one in self.size.linears), default=0)
        tp = self._num_parts // self.instance.layout.pp if self._num_parts > 1 else 1
        return -(-(largest * self.width + packed_bytes(largest, self.block)) // tp)

    def trained_bytes(self) -> int:
        """A rank's share of the weights that training changes."""
        return -(-self.part.num_trained * FLOAT32_BYTES // self.shards)

    def optimizer_bytes(self) -> int:
        """What the optimizer keeps of a rank's share of these weights."""
        return sum(kept.bytes_on(self.shards) for kept in kept_by(self.optimizer, self.size, self.part))

    def room_bytes(self) -> int:
        """Rooms on an accelerator for what the optimizer keeps elsewhere, while an update needs it."""
        whole, trained = self.optimizer_bytes(), max(1, self.trained_bytes())
        # The embedding is mostly the largest weight; adapters have none as large as a group.
        words = (
            0 if self.has_adapters else -(-self.size.vocab_size * self.size.hidden_size * FLOAT32_BYTES // self.shards)
        )
        return min(whole, STATE_ROOMS * max(STATE_GROUP_BYTES, min(words, trained) * whole // trained))

    def whole_matrix_bytes(self) -> int:
        """Matrices that `muon` gathers on the rank that owns them, which are whole in a step, and makes orthogonal."""
        if self.optimizer.type != "muon":
            return 0
        num_ranks, hidden = self.shards * self._num_parts, kept_by(self.optimizer, self.size, self.part)[0].weights
        largest = self.size.hidden_size * max(self.size.intermediate_size, self.size.query_size)
        return ((-(-hidden // self.shards) + largest) * (num_ranks > 1) + 4 * largest) * FLOAT32_BYTES

    @property
    def _num_parts(self) -> int:
        return 1 if self.part == self.size else self.instance.layout.tp * self.instance.layout.pp

    def adapted_bytes(self) -> int:
        """Memory of an engine apart from the trainer's for adapters: a base of its own, or weights with these merged.

        The latter are copies of what a rank holds, and there while they are sent.
        """
        if not self.has_adapters:
            return 0
        if self.engine.takes_adapters:
            return self.size.weight_bytes(self.width, self.block)
        return -(-self.size.num_parameters * FLOAT32_BYTES // self.shards)

    @property
    def engine(self) -> RolloutEngineSpec:
        """The contract of its engine."""
        return engine_for(self.sampling, self.instance.engine)

    def sent_bytes(self) -> int:
        """Bytes of the weights that are sent to its engine."""
        return (self.size.num_trained if self.adds_adapters else self.size.num_parameters) * self.width

    def engine_bytes(self) -> int:
        """An engine's own weights on one of the ranks that it spans; those of layers may be in low precision."""
        layout, size = self.instance.serving_layout, self.size
        own = size.weight_bytes(self.width, self.block if self.adds_adapters else 0)
        for one in self._formats("weights"):
            sight = size.vision.num_parameters if size.vision else 0
            count = size.num_expert_parameters if one.is_for_experts else size.num_layer_parameters - sight
            own -= int(count * (self.width - one.bytes_of_number))
        return -(-own // (layout.tp * layout.pp))

    @property
    def cache_width(self) -> float:
        """Bytes of a key or a value that the engine keeps."""
        return min([self.width, *(one.bytes_of_number for one in self._formats("keys and values"))])

    def _formats(self, part: Part) -> list[LowPrecision]:
        given = self.sampling.external.given_arguments
        return [one for one in formats_of(self.instance.engine, given) if one.part == part]

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
        num_layers, part = 2 if self.keeps == "nothing" else self.part.num_layers, self.part
        saved = part.weight_bytes(self.width, 0) - part.weight_bytes(self.width, self.block)
        gathered = (num_layers * self.num_gathered_per_layer + part.num_root_parameters) * self.width
        return gathered - saved * num_layers // part.num_layers

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
        norms = size.num_norms * ((4 if is_half else 3) - self.has_adapters) * size.hidden_size
        # Queries with results, and keys with values; and what norms of single heads keep.
        per_head = 2 + (3 if is_half else 2) * size.has_head_norms
        # A token is copied for each of its experts, and so are their results; both again where they are sent. Ranks
        # that have the same tokens send some of them each.
        layout = self.instance.layout
        copies = size.num_chosen_experts * (4 if layout.ep > 1 else 2) * size.hidden_size // layout.tp
        recurrent = -(-size.recurrence.num_kept * FLOAT32_BYTES // self.width)
        kinds, inner = size.kinds or (FULL,) * size.num_layers, size.intermediate_size
        alike = LayerSize(0, 1, inner, 0, has_indexer=False)
        for kind, layer in zip(kinds, size.layers or (alike,) * size.num_layers, strict=True):
            heads = layer.heads or size.heads
            yield (
                norms
                + per_head * (heads.num_heads + heads.num_kv_heads) * heads.head_dim * kind.has_attention
                + recurrent * kind.is_recurrent
                + layer.num_kept
                + 4 * layer.intermediate_size
                + copies * (layer.num_expert_parameters > 0)
            )

    def kept_values(self) -> int:
        """Numbers of each token that are held until the backward pass."""
        if self.config.gradient_checkpointing:
            return self.input_values() * (not self.config.offload_activations)
        return sum(self._values_of_layers())

    def input_values(self) -> int:
        """Numbers of each token in the inputs of all layers."""
        return self.part.num_layers * self.part.hidden_size

    def moving_values(self) -> int:
        """Numbers of each token in inputs of layers that are on their way to another memory, or back from it."""
        return INPUTS_MOVING * self.part.hidden_size * self.config.offload_activations

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

    def copied_bytes(self, work: PassMemory, heads: Heads | None = None) -> int:
        """Memory that a layer, by default the widest, fills for its attention and keeps for its backward pass.

        These are keys and values of what siblings share, for each. In float32 all tokens are laid out, and keys and
        values for each query head: queries, keys, values and results are kept so, and of the tokens themselves only
        the result. So it is where an indexer chooses keys, which are known for each sequence, with normalizers in
        float32.
        """
        heads = heads or self.part.heads
        queries, key_values = heads.query_size, heads.kv_values
        if self.part.indexer is not None:
            laid_out = (work.tokens + work.copies) * (4 * queries * self.width + self._choice_bytes(work))
            return laid_out - work.tokens * (queries + key_values) * self.width
        if self.width == FLOAT32_BYTES and work.sequences:
            laid_out = (work.tokens + work.copies) * 4 * queries
            return (laid_out - work.tokens * (queries + key_values)) * FLOAT32_BYTES
        return work.copies * key_values * self.width

    def all_copied_bytes(self, work: PassMemory) -> int:
        """The same of all layers whose copies are there at once: of one if layers are computed again."""
        if self.config.gradient_checkpointing:
            return self.copied_bytes(work)
        return sum(self.copied_bytes(work, heads) for heads in self.part.heads_of_layers())

    def attention_bytes(self, work: PassMemory, *, is_begin: bool) -> int:
        """Memory for the backward pass of a layer's attention beyond what its feed-forward part has released.

        FlashAttention-2, as torch has it, adds up the gradients of queries in float32, with 128 rows more for each
        sequence, and computes the gradients of keys and values for each query head, if there are fewer key heads,
        before it adds these up. All others are in the type of the model. FlashAttention-3 needs less. The feed-forward
        part has released its four inner vectors of each token by then, and when the backward pass begins the three
        that it made.
        """
        if not work.sequences or self.width == FLOAT32_BYTES or self.part.indexer is not None:
            return 0
        size, laid_out = self.part, work.tokens + work.copies
        queries = (work.tokens + 128 * work.sequences) * (size.query_size + size.num_heads) * FLOAT32_BYTES
        expanded = 2 * size.query_size * (size.num_heads != size.num_kv_heads)
        gradients = work.tokens * 2 * size.query_size + laid_out * (self._key_values + expanded)
        released = work.tokens * (7 if is_begin else 4) * size.intermediate_size
        return max(0, queries + (gradients - released) * self.width)

    def _choice_bytes(self, work: PassMemory) -> int:
        """Bytes of each token that is laid out: its normalizers, and whether it sees each key, which layers share."""
        size = self.part
        return FLOAT32_BYTES * size.num_heads + -(-work.longest * size.num_indexers // size.num_attention_layers)

    def indexed_bytes(self, work: PassMemory, *, is_cpu: bool, has_gradient: bool) -> int:
        """Memory for a layer whose indexer chooses keys, while it computes, or while its backward pass does.

        An indexer holds its scores of a sequence twice. Attention takes queries, keys and values into batches, in the
        backward pass results and their gradients, too, and adds a mask in float32. On accelerators it multiplies in
        float32, some scores at a time, of which it holds up to five tensors.
        """
        size = self.part
        if size.indexer is None:
            return 0
        scores = 2 * FLOAT32_BYTES * size.indexer.num_heads * work.longest**2
        laid_out = work.tokens + work.copies
        batches, wide = (9, 5) if has_gradient else (5, 2)
        numbers = laid_out * size.query_size * (batches * self.width + wide * FLOAT32_BYTES * (not is_cpu))
        blocks = 5 * min(SCORES_OF_BLOCK, laid_out * size.num_heads * work.longest) * (not is_cpu)
        return max(scores, numbers + (laid_out * work.longest + blocks) * FLOAT32_BYTES)

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


def models_of(
    recipe: Recipe, instances: Sequence[RoleInstance], sizes: Mapping[str, ModelSize | None], keeps: Whole
) -> list[list[ModelMemory]]:
    """The models of instances, each as its stages; none if the size of one is not known."""
    models, held_out = list[list[ModelMemory]](), recipe.data.evaluation
    # Held-out preferences are scored, and not answered.
    answers = bool(recipe.evaluation.every_steps) and not (held_out and held_out.preferences)
    for instance in instances:
        size, config = sizes.get(instance.role), recipe.model_of(instance.role)
        if size is None or config is None:
            return []
        own = as_judged(recipe, instance.role) if instance.is_judge else recipe.as_seen_by(instance.role)
        backend = backend_of(own.training.backend)
        is_divided = (backend.shards_along_axes or backend.keeps_parts) and not instance.is_engine_only
        tp, pp = (instance.layout.tp, instance.layout.pp) if is_divided else (1, 1)
        shards = backend.num_shards(instance.layout) // (tp * pp)
        generates = instance.has_engine or (answers and instance == answering(instances, recipe.evaluation.role))
        is_shared, width = base_of(recipe, instances, instance) is not None, number_bytes(config)
        guest = Guest.of(recipe, instances, instance) if size.vision is None else Guest()
        # Where ranks keep their parts, experts that are divided along `ep` are not divided along `tp`, too.
        part = size.part(tp, instance.layout.ep if backend.keeps_parts else 1)
        parts = [part.stage(pp, stage) for stage in range(pp)]
        kept = own.training.keep_whole
        whole = "nothing" if not backend.gathers_layers else keeps if kept == "auto" else kept
        sleeps = where_frozen(recipe, instances, instance)
        common = config, width, shards, own.rollout, generates, is_shared, guest, own.optimizer, whole, sleeps
        models.append([ModelMemory(instance, size, part, pp - stage, *common) for stage, part in enumerate(parts)])
    return models
