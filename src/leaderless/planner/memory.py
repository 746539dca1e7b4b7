"""An estimate of the memory that the fullest rank needs, phase by phase, on a CPU and on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from leaderless.config import Recipe
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import EngineName
from leaderless.planner.model_size import ModelSize

if TYPE_CHECKING:
    from leaderless.planner.plan import RoleInstance

FLOAT32_BYTES = 4
MIB = 1 << 20
MAX_LOGITS = 1 << 25
"""Logits of one chunk, and the most that are kept for the backward pass: `leaderless.models.scoring` has the same."""
CPU_MAX_LOGITS = 1 << 21
"""Logits of one chunk on a CPU."""
CPU_PASS_TOKENS = 2048
"""Tokens up to which samples of several prompts share a pass on a CPU: `leaderless.training.sharded` has the same."""
SMALLEST_SLOT = 64
"""Tokens of the smallest slot for keys and values: `leaderless.rollout.kv_cache` has the same."""
WRITE_BYTES = 256 * MIB
"""Most that writing or reading a checkpoint holds on top of the tensors themselves."""
WEIGHT_BUCKET_BYTES = 32 * MIB
"""Bytes of a bucket of weights on the way to serving ranks: `leaderless.training.weight_sync` has the same."""
LIBRARIES_BYTES = 330 * MIB
"""Python, torch and transformers in a process of their own."""
CONTEXT_BYTES = 600 * MIB
"""Memory of an accelerator that its driver takes for a process."""
COMMUNICATION_BYTES = 1024 * MIB
"""Buffers of the accelerator's communication library, where there are several ranks."""
LOGIT_BYTES, TRUNCATED_LOGIT_BYTES = 12, 40
"""Bytes for each logit of a decoding step: itself, scaled, and its weight; for top-p or top-k, sorted as well."""


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


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank on one kind of device.

    Attributes:
        resident: Parts that stay through a step, by what they are for.
        phases: Parts on top of these in each phase of a step; only one phase is under way at a time.
        apart: Parts of phases outside of steps: loading, resuming, and other commands.
        host: Parts in the memory of the host, on an accelerator.
    """

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    apart: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int]

    @property
    def totals(self) -> Mapping[str, int]:
        """All that is held in each phase."""
        resident = sum(self.resident.values())
        in_step = {name: resident + sum(parts.values()) for name, parts in self.phases.items()}
        return in_step | {name: sum(parts.values()) for name, parts in self.apart.items()}

    @property
    def peak(self) -> int:
        """Most that a run holds at any time."""
        totals = self.totals
        during = [totals[name] for name in (*self.phases, *self.apart) if name not in COMMANDS]
        return max(during, default=sum(self.resident.values()))

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {"peak": self.peak, **asdict(self), "totals": dict(self.totals)}


COMMANDS = ("export", "serve")
"""Phases of other commands, which the peak of a run does not depend on."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank.

    Attributes:
        cpu: Estimate for ranks that compute on the CPU.
        accelerator: Estimate for ranks with an accelerator each.
    """

    cpu: Memory
    accelerator: Memory

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {"cpu": self.cpu.to_json(), "accelerator": self.accelerator.to_json()}


@dataclass(frozen=True)
class Bounds:
    """Settings that a run may lower without changing a number.

    Attributes:
        pass_tokens: Most tokens of one pass.
        sequences: Most sequences that are decoded at the same time.
    """

    pass_tokens: int
    sequences: int


def estimate_memory(
    recipe: Recipe,
    instances: Sequence[RoleInstance],
    sizes: Mapping[str, ModelSize | None],
    longest_tokens: int,
    engine: EngineName,
    bounds: Bounds | None = None,
) -> MemoryEstimate | None:
    """Estimate the bytes on the rank that holds most.

    Weights, gradients and Adam's two moments are float32 and divided over the data-parallel ranks of a trained role
    (FSDP). A rank that generates holds a full copy of the weights for that phase, and its KV cache, both in the model's
    `compute_dtype`; engines in other processes have a copy of their own in any case. An asynchronous checkpoint is
    written from a copy, in host memory, that is kept for the next one.

    Args:
        recipe: Batch sizes and models.
        instances: All models and their layouts.
        sizes: Size of each role's model.
        longest_tokens: Longest sequence, in tokens.
        engine: Engine that generates.
        bounds: Bounds in place of the recipe's own.

    Returns:
        None when the size of a model that is used is not known.
    """
    if not instances or any(sizes.get(instance.role) is None for instance in instances):
        return None
    known = {role: size for role, size in sizes.items() if size is not None}
    batch = recipe.batch
    bounds = bounds or Bounds(batch.first_micro_batch_tokens(longest_tokens), recipe.rollout.max_sequences)
    ranks = {rank for instance in instances for rank in instance.layout.ranks}
    representatives = {frozenset(i for i, x in enumerate(instances) if rank in x.layout): rank for rank in ranks}

    def fullest(*, is_cpu: bool) -> Memory:
        estimates = (
            _Rank(recipe, [x for x in instances if rank in x.layout], instances, known, engine, bounds, is_cpu).memory()
            for rank in representatives.values()
        )
        return max(estimates, key=lambda memory: memory.peak)

    return MemoryEstimate(fullest(is_cpu=True), fullest(is_cpu=False))


@dataclass(frozen=True)
class _Rank:
    """One rank on one kind of device."""

    recipe: Recipe
    instances: Sequence[RoleInstance]
    everywhere: Sequence[RoleInstance]
    sizes: Mapping[str, ModelSize]
    engine: EngineName
    bounds: Bounds
    is_cpu: bool
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def memory(self) -> Memory:
        """The estimate of this rank."""
        resident: dict[str, int] = {}
        loading = whole = copied = 0
        for instance in self.instances:
            weights = self.sizes[instance.role].num_parameters * FLOAT32_BYTES
            share = -(-weights // instance.layout.dp)
            # Models are loaded whole, one after the other, and then divided.
            loading = max(loading, whole + weights)
            whole += share
            resident[f"{instance.role} weights"] = resident.get(f"{instance.role} weights", 0) + share
            if instance.is_trained:
                resident[f"{instance.role} optimizer"] = 2 * share
                copied += 3 * share
            self._add_phases(instance)
        libraries, kept = {"libraries": LIBRARIES_BYTES}, dict[str, int]()
        in_flight = min(WRITE_BYTES, copied)
        if copied and self.recipe.checkpoint.asynchronous:
            kept = {"checkpoint copy": copied, "files being written": in_flight}
        if copied and self.is_cpu:
            written = {} if kept else {"files being written": in_flight}
            self.phases["checkpoint"] = written
        if self.is_cpu:
            resumed = resident | libraries | {"files being read": in_flight} if copied else {}
            apart = {"loading": libraries | {"whole weights": loading}, "resume": resumed, **self._commands(libraries)}
            return Memory(resident | kept | libraries, self.phases, apart, {})
        resident["driver"] = CONTEXT_BYTES
        if len({rank for instance in self.everywhere for rank in instance.layout.ranks}) > 1:
            resident["communication"] = COMMUNICATION_BYTES
        host = libraries | kept | {"whole weights": loading}
        return Memory(resident, self.phases, self._commands({}), host)

    def _add_phases(self, instance: RoleInstance) -> None:
        role, size, model = instance.role, self.sizes[instance.role], self._model(instance.role)
        if instance.generates:
            self._add(f"{role} generates", self._generation(size, model, instance.layout.dp))
        if instance.scores:
            self._add(f"{role} scores", self._scoring(instance, size, model))
        if instance.is_trained:
            for moment in self._training(instance, size, model):
                self._add(f"{role} trains", moment)
        if any(x.role == role and x.is_trained != instance.is_trained for x in self.everywhere):
            self._add(f"weights of {role} travel", {"buckets": 4 * WEIGHT_BUCKET_BYTES})

    def _add(self, name: str, parts: dict[str, int]) -> None:
        """Add a phase, or a moment of one: the larger is kept."""
        self.phases[name] = max(self.phases.get(name, {}), parts, key=lambda parts: sum(parts.values()))

    def _model(self, role: str) -> ModelConfig:
        model = self.recipe.model_of(role)
        assert model is not None, "the planner refuses a role without a model"
        return model

    def _generation(self, size: ModelSize, model: ModelConfig, shards: int) -> dict[str, int]:
        width = _width(model)
        if self.engine != "native":
            cache = self._num_sequences(shards) * self._longest() * size.kv_values_per_token * width
            return {"engine's weights": size.num_parameters * width, "kv cache": cache}
        is_copied = shards > 1 or width != FLOAT32_BYTES
        # The unit that is gathered last lies in a buffer meanwhile.
        copy = (size.num_parameters + size.num_root_parameters) * width if is_copied else 0
        return {"unsharded weights": copy, **self._decoding(size, width, self._num_sequences(shards))}

    def _decoding(self, size: ModelSize, width: int, num_sequences: int) -> dict[str, int]:
        """Keys and values lie in slots of 64, 128, 256, … tokens; where they grow, the smaller ones are there, too."""
        siblings, sampling = self.recipe.batch.responses_per_prompt, self.recipe.rollout
        own, num_prompts = self.recipe.rollout.max_response_tokens, -(-num_sequences // siblings)
        slots = num_prompts * _slot(self.recipe.data.max_prompt_tokens)
        if siblings == 1:
            own, slots = self._longest(), 0
        largest = _slot(own)
        slots += num_sequences * (largest + (largest // 2 if largest > SMALLEST_SLOT else 0))
        per_logit = TRUNCATED_LOGIT_BYTES if sampling.is_truncated else LOGIT_BYTES
        logits = (num_sequences * per_logit + num_prompts * FLOAT32_BYTES) * size.vocab_size
        return {"kv cache": slots * size.kv_values_per_token * width, "logits": logits}

    def _longest(self) -> int:
        return self.recipe.data.max_prompt_tokens + self.recipe.rollout.max_response_tokens

    def _num_sequences(self, shards: int) -> int:
        """Sequences that a rank decodes at the same time."""
        if self.recipe.evaluation.every_steps:
            return self.bounds.sequences  # held-out prompts are not counted before they are read
        samples = -(-self.recipe.batch.prompts_per_step // shards) * self.recipe.batch.responses_per_prompt
        return min(self.bounds.sequences, samples)

    def _scoring(self, instance: RoleInstance, size: ModelSize, model: ModelConfig) -> dict[str, int]:
        """A pass without gradient holds a layer's own values, and those of one chunk of logits."""
        tokens, _ = self._pass(instance, -(-self.recipe.batch.prompts_per_step // self.recipe.batch.windows_per_step))
        kept = 3 * size.intermediate_size + 3 * size.hidden_size + size.num_heads * size.head_dim
        return {
            "gathered weights": self._gathered(size, model, instance.layout.dp),
            "activations": tokens * kept * _width(model),
            "logits": self._chunk(size, tokens) * 3 * FLOAT32_BYTES * (not instance.is_critic),
        }

    def _training(self, instance: RoleInstance, size: ModelSize, model: ModelConfig) -> Iterator[dict[str, int]]:
        """Memory is fullest when the backward pass begins, or when it ends."""
        batch, width, shards = self.recipe.batch, _width(model), instance.layout.dp
        tokens, num_passes = self._pass(instance, -(-batch.prompts_per_step // batch.updates_per_step))
        gradients = -(-size.num_parameters * FLOAT32_BYTES // shards)
        gathered = self._gathered(size, model, shards)
        embedding = size.vocab_size * size.hidden_size
        logits = self._chunk(size, tokens) * 3 * FLOAT32_BYTES + self._kept_logits(size, tokens) * width
        head = embedding * FLOAT32_BYTES + (embedding * width if width != FLOAT32_BYTES else 0)
        yield {
            "gathered weights": gathered,
            "activations": tokens * _kept_values(size, model) * width,
            "logits": logits * (not instance.is_critic),
            "gradient of the head": head * (not instance.is_critic),
            "gradients": gradients if num_passes > 1 else 0,
        }
        layer = size.num_layer_parameters // size.num_layers
        if gathered:
            # A unit's whole gradient as it was computed, and in float32 on its way to the ranks that hold its parts.
            reduced = max(2 * layer, size.num_root_parameters) * (width + FLOAT32_BYTES)
        else:
            reduced = embedding * FLOAT32_BYTES
        one_layer = tokens * _layer_values(size, model) * width
        yield {
            "gathered weights": size.num_root_parameters * width if gathered else 0,
            "activations": one_layer,
            "gradients": gradients,
            "gradients being summed": reduced,
        }

    def _pass(self, instance: RoleInstance, prompts: int) -> tuple[int, int]:
        """Most tokens of one pass over some prompts' samples, and the number of passes."""
        shards, data = instance.layout.dp, self.recipe.data
        is_generated = any(x.generates for x in self.everywhere)
        response = self.recipe.rollout.max_response_tokens if is_generated else data.max_response_tokens
        siblings = self.recipe.batch.responses_per_prompt if is_generated else 1
        own_prompts, own_samples = -(-prompts // shards), -(-prompts * siblings // shards)
        # The last token of a response is predicted, and predicts nothing.
        held = own_prompts * data.max_prompt_tokens + own_samples * (response - 1)
        bound = self.bounds.pass_tokens
        if self.is_cpu and shards == 1 and self._model(instance.role).compute_dtype == "float32":
            family = data.max_prompt_tokens + siblings * (response - 1)
            bound = min(bound, max(CPU_PASS_TOKENS, family))
        return min(bound, held), -(-held // bound)

    def _gathered(self, size: ModelSize, model: ModelConfig, shards: int) -> int:
        """Copies that compute, where weights are sharded or of another type: two layers, and what is no layer."""
        if shards == 1 and model.compute_dtype == "float32":
            return 0
        layer = size.num_layer_parameters // size.num_layers
        return (2 * layer + size.num_root_parameters) * _width(model)

    def _chunk(self, size: ModelSize, tokens: int) -> int:
        """Logits that are computed at the same time."""
        return min(tokens * size.vocab_size, max(CPU_MAX_LOGITS if self.is_cpu else MAX_LOGITS, size.vocab_size))

    def _kept_logits(self, size: ModelSize, tokens: int) -> int:
        chunk = self._chunk(size, tokens)
        return min(tokens * size.vocab_size, MAX_LOGITS // chunk * chunk)

    def _commands(self, libraries: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Parts of other commands with the model that answers, on one rank."""
        instance = next((x for x in self.instances if not x.is_critic), self.instances[0])
        size, model = self.sizes[instance.role], self._model(instance.role)
        width, weights = _width(model), size.num_parameters * FLOAT32_BYTES
        copy = (size.num_parameters + size.num_root_parameters) * width if width != FLOAT32_BYTES else 0
        serve = {"weights": weights, "unsharded weights": copy, **self._decoding(size, width, self.bounds.sequences)}
        # An export is written tensor by tensor, straight from the weights.
        exported = {"export": {**libraries, "weights": weights}} if self.is_cpu else {}
        return exported | {"serve": {**libraries, **serve}}


def _width(model: ModelConfig) -> int:
    """Bytes of a number as the model computes."""
    return 2 if model.compute_dtype == "bfloat16" else FLOAT32_BYTES


def _slot(tokens: int) -> int:
    return max(SMALLEST_SLOT, 1 << (tokens - 1).bit_length())


def _layer_values(size: ModelSize, model: ModelConfig) -> int:
    """Numbers that a layer keeps of each token for its backward pass.

    A norm keeps its input, what it makes of it before it is scaled, and its output; in half precision the first of
    these is a copy in float32. Attention keeps queries, keys, values and its output, the feed-forward part its gate
    before and after the activation, the other factor and their product.
    """
    is_half = _width(model) != FLOAT32_BYTES
    attention = size.num_heads * size.head_dim + size.num_kv_heads * size.head_dim
    norms = 2 * (4 if is_half else 3) * size.hidden_size
    if size.has_head_norms:
        norms += (3 if is_half else 2) * attention
    return norms + 2 * attention + 4 * size.intermediate_size


def _kept_values(size: ModelSize, model: ModelConfig) -> int:
    """Numbers of each token that are held when the backward pass begins, and what its first layer makes."""
    layer, made = _layer_values(size, model), 3 * size.intermediate_size
    if model.gradient_checkpointing:
        return size.num_layers * size.hidden_size + layer + made
    return size.num_layers * layer + made
