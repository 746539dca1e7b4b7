"""The memory of one model on a rank: weights, copies of them, and what passes keep of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaderless.config import Recipe
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import RolloutConfig
from leaderless.planner.adapters import donor_of
from leaderless.planner.engines import RolloutEngineSpec, engine_for
from leaderless.planner.model_size import ModelSize
from leaderless.planner.parts import RoleInstance

FLOAT32_BYTES = 4


def number_bytes(config: ModelConfig) -> int:
    """Bytes of a number as a model computes."""
    return 2 if config.compute_dtype == "bfloat16" else FLOAT32_BYTES


@dataclass(frozen=True)
class Guest:
    """Whether a model, and its native engine, use the weights of another role's under adapters of their own."""

    trains: bool = False
    generates: bool = False

    @classmethod
    def of(cls, recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> Guest:
        """Find out for an instance."""
        donor = donor_of(recipe, instances, instance)
        is_native = donor is not None and donor.generates and instance.engine == donor.engine == "native"
        return cls(donor is not None and not instance.is_engine_only, is_native)


@dataclass(frozen=True)
class ModelMemory:
    """A model with the bytes of a number as it computes, how many ranks divide its weights, and how it generates.

    Ranks along `tp` and `pp` have a part each, and others divide the weights of a part. `num_ahead` micro-batches are
    held at the same time, if there are as many: on each stage of a pipeline, as many as there are stages from it on.

    It generates if a node does so with it, or if it is evaluated. It is shared if it is another one without adapters.
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

    @property
    def is_stage(self) -> bool:
        """Whether it is a stage of a pipeline, which is sharded, if only over itself."""
        return self.part.num_layers < self.size.num_layers

    @property
    def has_logits(self) -> bool:
        """Whether it computes logits."""
        return self.num_ahead == 1 and not self.instance.is_critic

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.config.lora is not None

    @property
    def has_own_base(self) -> bool:
        """Whether an engine next to the trainer has the weights once more, to which it adds adapters."""
        is_beside = self.generates and not self.instance.is_engine_only
        return is_beside and self.adds_adapters and not (self.engine.keeps_weights or self.guest.generates)

    @property
    def keeps_base_asleep(self) -> bool:
        """Whether an engine next to the trainer copies the weights, to which it adds adapters, to the host to sleep."""
        is_beside = self.generates and not self.instance.is_engine_only
        return is_beside and self.adds_adapters and self.engine.keeps_weights

    @property
    def adds_adapters(self) -> bool:
        """Whether its engine adds adapters to weights that it reads itself, so that only they are sent."""
        return self.has_adapters and self.engine.takes_adapters

    def trained_bytes(self) -> int:
        """A rank's share of the weights that training changes."""
        return -(-self.part.num_trained * FLOAT32_BYTES // self.shards)

    def adapted_bytes(self) -> int:
        """What an engine that is not the trainer's has for adapters: a base of its own, or weights with these merged.

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
        """What its engine is sent."""
        return (self.size.num_trained if self.adds_adapters else self.size.num_parameters) * self.width

    def engine_bytes(self) -> int:
        """An engine's own weights on one of the ranks that it spans."""
        layout = self.instance.serving_layout
        return -(-self.size.num_parameters * self.width // (layout.tp * layout.pp))

    @property
    def num_gathered_per_layer(self) -> int:
        """Weights of a layer that are gathered at once: not those of experts that stay divided."""
        return (self.size.num_gathered(self.instance.layout) - self.part.num_root_parameters) // self.size.num_layers

    def gathered_bytes(self) -> int:
        """Copies that compute, where weights are sharded or of another type: two layers, and what is in no layer."""
        if self.shards == 1 and self.width == FLOAT32_BYTES and not self.is_stage:
            return 0
        return (2 * self.num_gathered_per_layer + self.part.num_root_parameters) * self.width

    def converted_bytes(self, num_layers: int) -> int:
        """Copies in the type that computes of the experts that a rank keeps, in some layers."""
        size, layout = self.size, self.instance.layout
        if layout.ep == 1 or self.width == FLOAT32_BYTES:
            return 0
        return -(-size.num_expert_parameters * num_layers // (size.num_layers * layout.ep)) * self.width

    def layer_values(self) -> int:
        """Numbers that a layer keeps of each token for its backward pass.

        A norm keeps its input, the normalized input before scaling, and its output; in half precision the first of
        these is a copy in float32. Attention keeps queries, keys, values and its output, the feed-forward part its gate
        before and after the activation, the other factor and their product, and experts their tokens and results.
        """
        size, is_half = self.part, self.width != FLOAT32_BYTES
        attention = size.num_heads * size.head_dim + size.num_kv_heads * size.head_dim
        norms = 2 * (4 if is_half else 3) * size.hidden_size
        if size.has_head_norms:
            norms += (3 if is_half else 2) * attention
        # A token is copied for each of its experts, and so are their results; both again where they are sent.
        copies = size.num_chosen_experts * (4 if self.instance.layout.ep > 1 else 2) * size.hidden_size
        return norms + 2 * attention + 4 * size.intermediate_size + copies

    def kept_values(self) -> int:
        """Numbers of each token that are held until the backward pass."""
        size = self.part
        return size.num_layers * (size.hidden_size if self.config.gradient_checkpointing else self.layer_values())

    def made_values(self) -> int:
        """Numbers of each token that the backward pass makes in its first layer."""
        return self.layer_values() * self.config.gradient_checkpointing + 3 * self.part.intermediate_size

    def seen_values(self) -> int:
        """The same of the part that sees, for each token of an image."""
        if self.part.vision is None:
            return 0
        return self.part.vision.kept_values(gradient_checkpointing=self.config.gradient_checkpointing)
