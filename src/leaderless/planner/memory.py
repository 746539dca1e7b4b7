"""An estimate of the memory that the fullest rank needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from leaderless.config import Recipe
from leaderless.config.models import ModelConfig
from leaderless.planner.layout import Layout
from leaderless.planner.model_size import ModelSize

FLOAT32_BYTES = 4
MAX_LOGITS = 1 << 25
"""Logits that a forward or backward pass holds at a time; `leaderless.models.scoring` computes no more at once."""


def format_bytes(count: int) -> str:
    """Bytes for a reader, as `1.5 GiB`.

    Args:
        count: 0 or more.
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1023.5:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"


class Instance(Protocol):
    """What the estimate needs to know of a model on a layout."""

    @property
    def role(self) -> str:
        """The role that the model plays."""

    @property
    def layout(self) -> Layout:
        """Its ranks."""

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients and an optimiser."""

    @property
    def generates(self) -> bool:
        """Whether it is unsharded to generate."""

    @property
    def scores(self) -> bool:
        """Whether it is asked for log-probabilities or values."""

    @property
    def is_critic(self) -> bool:
        """Whether it gives a value where others give logits."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. What is resident stays through the step; of the phases only one is there at a time.

    Attributes:
        resident: By what it is for: weights, gradients, optimiser.
        phases: Working memory by phase: generation, scoring or training.
    """

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]

    @property
    def peak(self) -> int:
        """Resident memory and the largest phase."""
        return sum(self.resident.values()) + max((sum(parts.values()) for parts in self.phases.values()), default=0)

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        phases = {name: dict(parts) for name, parts in self.phases.items()}
        return {"peak": self.peak, "resident": dict(self.resident), "phases": phases}


def estimate_memory(
    recipe: Recipe, instances: Sequence[Instance], sizes: Mapping[str, ModelSize | None], longest_tokens: int
) -> Memory | None:
    """Estimate the bytes on the rank that holds most, activations included.

    Weights, gradients and Adam's two moments are float32 and divided over the data-parallel ranks of a trained role
    (FSDP); a rank that generates holds a full copy of the weights for that phase, and its KV cache, both in the
    model's `compute_dtype`. Activations follow the usual count of about 16 hidden vectors and 3 feed-forward vectors
    per token and layer, or one hidden vector when they are recomputed. Logits are computed in chunks, of which four
    float32 copies are alive: as they are, their probabilities, those that are held for the backward pass, and one
    that is made meanwhile.

    Args:
        recipe: Batch sizes and models.
        instances: All models and where they are.
        sizes: Size of each role's model.
        longest_tokens: Longest sequence, in tokens.

    Returns:
        None when the size of a model that is used is not known.
    """
    if any(sizes.get(instance.role) is None for instance in instances):
        return None
    ranks = {rank for instance in instances for rank in instance.layout.ranks}
    representatives = {frozenset(i for i, x in enumerate(instances) if rank in x.layout): rank for rank in ranks}
    estimates = [
        _estimate_rank(recipe, [x for x in instances if rank in x.layout], sizes, longest_tokens)
        for rank in representatives.values()
    ]
    return max(estimates, key=lambda memory: memory.peak, default=None)


def _estimate_rank(
    recipe: Recipe, instances: Sequence[Instance], sizes: Mapping[str, ModelSize | None], longest_tokens: int
) -> Memory:
    resident: dict[str, int] = {}
    phases: dict[str, dict[str, int]] = {}
    for instance in instances:
        size = sizes[instance.role]
        assert size is not None
        model = recipe.model_of(instance.role)
        assert model is not None
        role, shards = instance.role, instance.layout.dp
        width = 2 if model.compute_dtype == "bfloat16" else FLOAT32_BYTES
        # What computes are copies of the weights where these are sharded or of another type.
        copied = size.num_parameters * width if shards > 1 or width != FLOAT32_BYTES else 0
        weights = size.num_parameters * FLOAT32_BYTES
        resident[f"{role} weights"] = resident.get(f"{role} weights", 0) + -(-weights // shards)
        if instance.is_trained:
            resident[f"{role} gradients"] = -(-weights // shards)
            resident[f"{role} optimizer"] = 2 * -(-weights // shards)
        if instance.generates:
            phases[f"{role} generates"] = {
                "unsharded weights": copied,
                "kv cache": _num_sequences(recipe, shards) * longest_tokens * size.kv_values_per_token * width,
            }
        if instance.is_trained or instance.scores:
            name = f"{role} trains" if instance.is_trained else f"{role} scores"
            tokens = recipe.batch.first_micro_batch_tokens(longest_tokens)
            parts = _forward_memory(model, size, tokens, copied // size.num_layers, is_trained=instance.is_trained)
            parts["logits"] *= not instance.is_critic
            phases[name] = max(phases.get(name, {}), parts, key=lambda parts: sum(parts.values()))
    return Memory(resident, phases)


def _num_sequences(recipe: Recipe, shards: int) -> int:
    """Sequences that a rank decodes at the same time."""
    if recipe.evaluation.every_steps:
        return recipe.rollout.max_sequences  # the held-out prompts are not counted before they are read
    samples = -(-recipe.batch.prompts_per_step // shards) * recipe.batch.responses_per_prompt
    return min(recipe.rollout.max_sequences, samples)


def _forward_memory(
    model: ModelConfig, size: ModelSize, tokens: int, copied_layer: int, *, is_trained: bool
) -> dict[str, int]:
    """Working memory of a forward pass, and of its backward pass when the role is trained."""
    width = 2 if model.compute_dtype == "bfloat16" else FLOAT32_BYTES
    layer = 16 * size.hidden_size + 3 * size.intermediate_size
    if not is_trained:
        kept = layer
    elif model.gradient_checkpointing:
        kept = size.num_layers * size.hidden_size + layer
    else:
        kept = size.num_layers * layer
    return {
        "gathered layers": 2 * copied_layer,
        "activations": tokens * kept * width,
        "logits": 4 * min(tokens * size.vocab_size, max(MAX_LOGITS, size.vocab_size)) * FLOAT32_BYTES,
    }
