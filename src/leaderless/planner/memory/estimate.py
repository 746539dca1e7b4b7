"""An estimate of the memory that the fullest rank needs, phase by phase, on a CPU and on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from leaderless.base.named_functions import load_own
from leaderless.config import Recipe
from leaderless.config.models import Whole
from leaderless.planner.engines import backend_of
from leaderless.planner.graph.adapters import base_of
from leaderless.planner.graph.judges import as_judged
from leaderless.planner.layout import all_ranks
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.memory.engine import EngineMemory
from leaderless.planner.memory.limits import (
    CPU_MAX_LOGITS,
    CPU_PASS_TOKENS,
    DEVICE_WEIGHT_BUCKET_BYTES,
    MAX_LOGITS,
    MIB,
    PINNED_BYTES,
    READ_BYTES,
    WEIGHT_BUCKET_BYTES,
    CacheBound,
    CachePool,
)
from leaderless.planner.memory.model import FLOAT32_BYTES, Guest, ModelMemory, PassMemory, number_bytes
from leaderless.planner.memory.rank import Bounds, MemoryEstimate, Parts, RankMemory, Room, fullest_rank
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import RoleInstance, answering
from leaderless.planner.workflow.products import PRODUCTS

OwnEstimate = Callable[[Recipe, Plan, Sequence[int], tuple[Bounds, Bounds]], MemoryEstimate | None]
"""Function that estimates the memory of runs of a kind; see `ProductFunctions.memory`."""
SHORT = 4
"""Part of the longest response that responses have where passes hold many prompts."""
CHECKSUM_BYTES = 64 * MIB
"""Bytes of factors and products of a checksum on an accelerator: see `leaderless.distributed.weights.buckets`."""


def estimate_memory(
    recipe: Recipe,
    plan: Plan,
    pass_tokens: int,
    max_sequences: int | None = None,
    among: Sequence[int] | None = None,
    room: Room | None = None,
) -> MemoryEstimate | None:
    """Estimate the bytes on the rank that holds most, of all or `among` some.

    It is None when the size of a model that is used is not known.

    Weights, gradients and Adam's two moments are float32, and divided over the data-parallel ranks of a role if the
    training back end does that. A rank that generates holds a full copy of the weights for that phase, and its KV
    cache, both in the model's `compute_dtype`; engines in other processes have a copy in any case, and a rank that only
    generates holds nothing else of the model. The ranks that an engine spans divide its weights and KV cache. An
    asynchronous checkpoint is written from a copy, in host memory, that is kept for the next one; what is in flight in
    a channel is there too, on the ranks that push it, and new weights arrive there while an engine generates. A pass
    has at most `pass_tokens`; at most `max_sequences` are decoded at the same time, by default what the recipe allows
    each role. What ranks use `room` for is counted, too; on an accelerator, it bounds the pools of native engines for
    keys and values.
    """
    room, ranks = room or Room(), among or all_ranks(*(instance.layout for instance in plan.instances))
    on_cpu = Bounds(pass_tokens, max_sequences, MAX_LOGITS, is_cpu=True, cache=room.cache)
    bounds = on_cpu, on_cpu._replace(max_logits=room.max_logits, is_cpu=False)
    if own := PRODUCTS[recipe.product].memory:
        return cast("OwnEstimate", load_own(own))(recipe, plan, ranks, bounds)
    models = models_of(recipe, plan.instances, plan.sizes, room.keeps)
    return fullest_rank(LanguageRank, recipe, plan, models, ranks, bounds)


def plan_pool(
    recipe: Recipe,
    instances: Sequence[RoleInstance],
    sizes: Mapping[str, ModelSize | None],
    instance: RoleInstance,
    cache: CacheBound,
) -> CachePool | None:
    """The pool of an instance's native engine on an accelerator; None where the size of a model is not known.

    It is also None where the engine has no pages for the model, whose keys and values are then in slots.
    """
    models, size = models_of(recipe, instances, sizes, "nothing"), sizes.get(instance.role)
    if not models or size is None or not size.is_plain:
        return None
    everywhere = [stages[0] for stages in models]
    model = everywhere[instances.index(instance)]
    engine = EngineMemory(recipe, model, cache, is_cpu=False)
    return CachePool(engine.pool_tokens(), cache.stays or instance.is_engine_only)


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
        common = config, width, shards, own.rollout, generates, is_shared, guest, whole
        models.append([ModelMemory(instance, size, part, pp - stage, *common) for stage, part in enumerate(parts)])
    return models


def _largest_weight(model: ModelMemory) -> int:
    """Bytes of the embedding, which is usually the largest weight."""
    return model.size.vocab_size * model.size.hidden_size * model.width


def _states(size: int) -> Parts:
    """Bytes of states, where there are some."""
    return {"states": size} if size else {}


@dataclass(frozen=True)
class LanguageRank(RankMemory[ModelMemory]):
    """A rank with language models."""

    def saved_bytes(self) -> int:
        """Weights and moments of what is trained."""
        return sum(3 * model.trained_bytes() * model.instance.is_trained for model in self.models)

    def _share(self, model: ModelMemory) -> int:
        """A rank's share of the weights that it holds of a model to train or score with it."""
        part = model.part
        held = part.num_parameters * (not model.guest.trains) + part.num_adapter_parameters
        return -(-held * FLOAT32_BYTES // model.shards)

    def loading(self) -> Parts:
        """Models are read one after the other.

        With most back ends each rank reads its own part, a few rows at a time, straight to where it stays; with others,
        models are read whole, and then divided.
        """
        moments, before = [{"weights being read": 0}], 0
        for model in self.models:
            if model.is_shared or model.instance.is_engine_only:
                continue
            share, whole = self._share(model), model.size.num_parameters * FLOAT32_BYTES
            kept = {"weights": before + share} if self.is_cpu else {}
            if backend_of(self.recipe.as_seen_by(model.instance.role).training.backend).reads_parts:
                moments.append(kept | {"weights being read": min(READ_BYTES, share)})
            else:
                moments.append({"weights": before} | {"whole weights": whole * (not model.guest.trains)})
            before += share * self.is_cpu
            if model.has_base_beside and not model.engine.keeps_weights:
                base = model.adapted_bytes()
                kept = {"weights": before + base} if self.is_cpu else {}
                moments.append(kept | {"weights being read": min(READ_BYTES, base)})
                before += base * self.is_cpu
        return max(moments, key=lambda parts: sum(parts.values()))

    def resident(self, model: ModelMemory) -> Iterator[tuple[str, int]]:
        """Weights or a share of them, the optimizer, and what engines keep."""
        role = model.instance.role
        if model.instance.is_engine_only:
            yield f"{role} engine's weights", model.sent_bytes() if model.guest.generates else model.engine_bytes()
        elif not model.is_shared:
            yield f"{role} weights", self._share(model)
            if model.has_base_beside and not model.engine.keeps_weights:
                yield f"{role} engine's base", model.adapted_bytes()
        if model.instance.is_trained:
            yield f"{role} optimizer", 2 * model.trained_bytes()
        if (engine := self._engine(model)).stays:
            sent = model.sent_bytes() if model.has_adapters else model.size.num_parameters * model.width
            yield f"{role} engine asleep", sent + sum(engine.kept().values())

    def _engine(self, model: ModelMemory) -> EngineMemory:
        return EngineMemory(self.recipe, model, self.bounds.cache, self.is_cpu, self.bounds.max_sequences)

    def waiting(self) -> Parts:
        """Rows that wait until other ranks take them, and copies of a rank's share of weights, in the type of engines.

        New weights wait until the engine takes them. Engines that may start again have theirs once more, and others
        move what they add adapters to out of their way.
        """
        restarting = [
            model.sent_bytes()
            for model in self.models
            if model.instance.is_engine_only and model.engine.restarts_on(model.instance.serving_layout)
        ]
        parts = {"weights for a restart": sum(restarting)} if any(restarting) else {}
        kept = (model for model in self.models if model.has_base_beside and model.engine.keeps_weights)
        asleep = sum(model.engine_bytes() for model in kept)
        if asleep and not self.is_cpu:
            parts["bases of engines asleep"] = asleep
        for channel in self.pushed:
            size = channel.max_bytes
            if channel.sync is not None:
                role = channel.sync.role
                model = next(x for x in self.models if x.instance.role == role and x.instance.is_trained)
                sent = model.part.num_trained if model.adds_adapters else model.part.num_parameters
                size = self._pinned_bytes(-(-sent * model.width // model.shards), model)
            name = f"{channel.kind} in flight"
            parts[name] = parts.get(name, 0) + channel.capacity * size
        arriving = [self._pinned_bytes(model.sent_bytes(), model) for model in self.models if self._is_fed(model)]
        return parts | ({"weights that arrive": sum(arriving)} if arriving else {})

    def _pinned_bytes(self, size: int, model: ModelMemory) -> int:
        """Weights on the host; for an accelerator in blocks of pinned memory, at whose ends some room is left."""
        largest = _largest_weight(model)
        if self.is_cpu:
            return size
        if size <= PINNED_BYTES:
            return 1 << (size - 1).bit_length()
        alone = (1 << (largest - 1).bit_length()) - largest if largest > PINNED_BYTES else 0
        return -(-9 * size // (8 * PINNED_BYTES)) * PINNED_BYTES + alone

    def _is_fed(self, model: ModelMemory) -> bool:
        """Whether new weights come to the engine of a model while it generates."""
        taken = [channel.sync for channel in self.pulled if channel.sync is not None]
        return any((x.role, x.target_layout) == (model.instance.role, model.instance.layout) for x in taken)

    def phases(self, model: ModelMemory) -> Iterator[tuple[str, Parts]]:
        """Generating, scoring, training, and new weights on their way."""
        instance, role = model.instance, model.instance.role
        others = (x.instance for x in self.everywhere if x.instance.role == role)
        is_sent = any(other.is_trained != instance.is_trained for other in others)
        if model.generates:
            does = "judges" if instance.is_judge else "generates"
            travel = self._travel(model) if self._is_fed(model) else {}
            yield from ((f"{role} {does}", moment | travel) for moment in self._generation(model))
        if instance.scores:
            yield f"{role} scores", self._scoring(model)
        if instance.is_trained:
            yield from ((f"{role} trains", moment) for moment in self._training(model))
        if is_sent:
            yield f"weights of {role} travel", self._travel(model)

    def _travel(self, model: ModelMemory) -> Parts:
        """Memory for sending and receiving new weights."""
        # An engine replaces a weight when all of it has come: for a moment the largest one is there twice.
        parts = {"largest weight": _largest_weight(model)} if model.instance.is_engine_only else {}
        if model.has_adapters and not model.instance.is_engine_only and not model.engine.takes_adapters:
            parts["merged weights"] = model.adapted_bytes()
        bucket = WEIGHT_BUCKET_BYTES if self.is_cpu else min(DEVICE_WEIGHT_BUCKET_BYTES, model.sent_bytes())
        return {"buckets": 4 * bucket + CHECKSUM_BYTES * (not self.is_cpu), **parts}

    def _generation(self, model: ModelMemory) -> Iterator[Parts]:
        size, engine = model.size, self._engine(model)
        own, is_resident = size.num_parameters * model.width, model.instance.is_engine_only
        if model.engine.keeps_weights:
            cache = engine.num_sequences * engine.longest * size.compressed_values_per_token * model.width
            states = engine.num_sequences * size.state_bytes(model.width)
            spanned = model.instance.serving_layout.tp * model.instance.serving_layout.pp
            parts = size.num_kv_parts(model.instance.serving_layout)
            own = 0 if is_resident else model.engine_bytes() + model.adapted_bytes() * (not model.engine.takes_adapters)
            # New weights come while the cache is there: to this rank, and from it into two stagings and a copy of one.
            # A weight is whole there, also if it is larger than a bucket.
            largest = min(_largest_weight(model), model.sent_bytes())
            bucket = max(largest, min(DEVICE_WEIGHT_BUCKET_BYTES, model.sent_bytes()))
            whole = {"largest weight": largest, "buckets for the engine": 3 * bucket}
            loading = {} if self.is_cpu else self._travel(model) | whole
            yield {"engine's weights": own, "kv cache": -(-cache // parts), **_states(-(-states // spanned)), **loading}
            return
        is_copied = model.shards > 1 or model.part != model.size or model.width != FLOAT32_BYTES
        weights = {} if is_resident or model.has_adapters else {"unsharded weights": own * is_copied}
        held = {} if engine.stays else weights | engine.kept()
        yield from (held | moment for moment in engine.moments())

    def _scoring(self, model: ModelMemory) -> Parts:
        """A pass without gradient holds a layer's own values, and the values of one chunk of logits."""
        size, batch = model.part, self.recipe.batch
        prompts = -(-batch.prompts_per_step // batch.windows_per_step)
        work = self._pass(model, prompts)
        seen = self._seen(model, work.tokens, prompts)
        tokens, held = work.tokens, model.held_values(size) + size.query_size
        held += (model.num_ahead - 1) * size.hidden_size  # until the last stage has their results
        return {
            "gathered weights": model.gathered_bytes(),
            "converted experts": model.converted_bytes(1),
            "activations": max(tokens * held * model.width, seen * model.vision.held_values() * model.width),
            "pixels": seen * model.vision.pixel_bytes(model.width),
            "copies for attention": model.copied_bytes(work),
            **_states(model.state_bytes(work, num_layers=1)),
            "logits": self._chunk(size, tokens) * 3 * FLOAT32_BYTES * model.has_logits,
        }

    def _training(self, model: ModelMemory) -> Iterator[Parts]:
        """Memory is fullest in the backward pass: of the head, of the last layer, or when it ends."""
        batch, size, width = self.recipe.batch, model.part, model.width
        prompts = -(-batch.prompts_per_step // batch.parts_per_step)
        work = self._pass(model, prompts)
        tokens, num_passes, copied = work.tokens, work.number, model.copied_bytes(work)
        copies = 1 if model.config.gradient_checkpointing else size.num_attention_layers
        seen = self._seen(model, tokens, prompts)
        states = model.state_bytes(work, num_layers=1 if model.config.gradient_checkpointing else None)
        gradients, num_held = model.gradient_bytes(), min(model.num_ahead, num_passes)
        kept = (num_held - 1) * copies * (not model.config.gradient_checkpointing)  # of other micro-batches
        gathered, embedding = model.gathered_bytes(), size.vocab_size * size.hidden_size
        chunk = self._chunk(size, tokens)
        logits = (
            chunk * 3 * FLOAT32_BYTES + min(tokens * size.vocab_size, self.bounds.max_logits // chunk * chunk) * width
        )
        head = embedding * FLOAT32_BYTES + (embedding * width if width != FLOAT32_BYTES else 0)
        before = tokens * model.kept_values() * num_held + seen * model.vision.kept_values(
            gradient_checkpointing=model.config.gradient_checkpointing
        )
        begins = {
            "gathered weights": gathered,
            # The backward pass of a layer needs them as they were.
            "converted experts": model.converted_bytes(1 if model.config.gradient_checkpointing else size.num_layers),
            "activations": before * width,
            "pixels": seen * model.vision.pixel_bytes(model.width),
            "copies for attention": copied * (kept + copies * (not model.config.gradient_checkpointing)),
            **_states(states * (num_held if not model.config.gradient_checkpointing else 1)),
            "gradients": gradients if num_passes > 1 else 0,
        }
        scored = {
            "logits": logits * model.has_logits,
            "gradient of the head": head * (model.has_logits and not model.has_adapters),
        }
        made = model.layer_values() * model.config.gradient_checkpointing + 3 * size.intermediate_size
        inner = {  # in the first layer that goes backward
            "activations": (before + tokens * made) * width,
            "copies for attention": copied * (kept + copies),
            "gradients of attention": model.attention_bytes(work, is_begin=True),
            "dropout of adapters": model.dropped_bytes(tokens),
        }
        if self.is_cpu:  # whose allocator keeps what one of them has released
            yield begins | scored | inner
        else:
            yield begins | scored
            # The gradient of the head waits for the embedding's, which may be the same.
            yield begins | inner | {"gradient of the head": embedding * width * (scored["gradient of the head"] > 0)}
        # A unit's whole gradient as it was computed, and in float32 on its way to the ranks that hold its parts; gloo
        # sums in a copy of its own.
        largest_unit = max(2 * model.num_gathered_per_layer, size.num_root_parameters)
        if model.has_adapters:
            largest_unit, embedding = 2 * size.num_trained // size.num_layers, 0
        sent = FLOAT32_BYTES * (2 if self.is_cpu and model.shards > 1 else 1)
        yield {
            "gathered weights": size.num_root_parameters * width if gathered else 0,
            "activations": tokens * (model.kept_values() * (num_held - 1) + model.layer_values()) * width,
            "copies for attention": copied * (kept + 1),
            "gradients of attention": model.attention_bytes(work, is_begin=False),
            "dropout of adapters": model.dropped_bytes(tokens),
            "gradients": gradients if num_passes > 1 else model.trained_bytes(),
            "gradients being summed": largest_unit * (width + sent) if gathered else embedding * FLOAT32_BYTES,
        }

    def _seen(self, model: ModelMemory, tokens: int, prompts: int) -> int:
        """Most tokens of images in a pass; ranks along `cp` compute the images of the whole pass each."""
        layout = model.instance.layout
        return min(tokens * layout.cp, -(-prompts // layout.dp) * self.recipe.data.max_prompt_tokens)

    def _pass(self, model: ModelMemory, prompts: int) -> PassMemory:
        """The largest pass over some prompts' samples."""
        shards, data = model.instance.layout.dp, self.recipe.data
        agents = dict.fromkeys(x.instance.role for x in self.everywhere if x.instance.generates)
        response = self.recipe.longest_response(agents) if agents else data.max_response_tokens
        siblings = self.recipe.batch.responses_per_prompt if agents else (2 if data.preferences else 1)
        own_prompts, own_samples = -(-prompts // shards), -(-prompts * siblings // shards)
        # The last token of a response is predicted, and predicts nothing.
        held = -(-(own_prompts * data.max_prompt_tokens + own_samples * (response - 1)) // model.instance.layout.cp)
        bound = self.bounds.pass_tokens
        if self.is_cpu and model.is_plain:
            family = data.max_prompt_tokens + siblings * (response - 1)
            bound = min(bound, max(CPU_PASS_TOKENS, family))
        tokens, number = min(bound, held), -(-held // bound)
        family = data.max_prompt_tokens + siblings * -(-response // SHORT)
        families = min(own_prompts, max(1, tokens // family))
        if self.is_cpu or model.instance.layout.cp > 1:
            return PassMemory(tokens, number, states=families * (1 + siblings))
        copies = families * siblings * data.max_prompt_tokens * (siblings > 1)
        return PassMemory(tokens, number, copies, families * (1 + siblings), families * (1 + siblings))

    def _chunk(self, size: ModelSize, tokens: int) -> int:
        """Logits that are computed at the same time."""
        most = CPU_MAX_LOGITS if self.is_cpu else self.bounds.max_logits
        return min(tokens * size.vocab_size, max(most, size.vocab_size))

    def commands(self, libraries: Parts, resumed: Parts) -> Mapping[str, Parts]:
        """A run that is resumed, and other commands with the model that answers, on one rank."""
        model = next((x for x in self.models if not x.instance.is_critic), self.models[0])
        weights = model.size.num_parameters * FLOAT32_BYTES
        has_own = model.width != FLOAT32_BYTES or (model.has_adapters and model.engine.takes_adapters)
        copy = model.size.num_parameters * model.width * has_own
        engine = EngineMemory(
            self.recipe, model, self.bounds.cache, self.is_cpu, self.bounds.max_sequences, is_served=True
        )
        serve = {"weights": weights, "unsharded weights": copy, **engine.fullest()}
        # An export is written tensor by tensor, straight from the weights.
        others = {"resume": resumed, "export": {**libraries, "weights": weights}} if self.is_cpu else {}
        return others | {"serve": {**libraries, **serve}}
