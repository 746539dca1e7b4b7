"""An estimate of the memory that the fullest rank needs, phase by phase, on a CPU and on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from leaderless.base.named_functions import load_own
from leaderless.config import Recipe
from leaderless.config.models import Offload
from leaderless.planner.engines import backend_of, may_send_differences
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
from leaderless.planner.memory.model import FLOAT32_BYTES, ModelMemory, PassMemory, models_of
from leaderless.planner.memory.rank import Bounds, MemoryEstimate, Parts, RankMemory, Room, fullest_rank
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Channel, RoleInstance
from leaderless.planner.workflow.products import PRODUCTS

OwnEstimate = Callable[[Recipe, Plan, Sequence[int], tuple[Bounds, Bounds]], MemoryEstimate | None]
"""Function that estimates the memory of runs of a kind; see `ProductFunctions.memory`."""
SHORT = 4
"""Part of the longest response that responses have where passes hold many prompts."""
PACKING_BYTES = 32 * MIB
"""Copies of a million numbers that are made while these are quantized, as measured."""
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

    Weights and gradients are float32, and divided with what the optimizer keeps over the data-parallel ranks of a role
    if the training back end does that. A rank that generates holds a full copy of the weights for that phase, and its
    KV cache, both in the model's `compute_dtype`; engines in other processes have a copy in any case, and a rank that
    only generates holds nothing else of the model. The ranks that an engine spans divide its weights and KV cache. An
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


def _largest_weight(model: ModelMemory) -> int:
    """Bytes of the embedding, which is usually the largest weight."""
    return model.size.vocab_size * model.size.hidden_size * model.width


def _unpacked(model: ModelMemory) -> Parts:
    """Bytes of the weight that is unpacked, where weights have 4 bits."""
    return {"unpacked weight": model.unpacked_bytes()} if model.block else {}


def _states(size: int) -> Parts:
    """Bytes of states, where there are some."""
    return {"states": size} if size else {}


@dataclass(frozen=True)
class LanguageRank(RankMemory[ModelMemory]):
    """A rank with language models."""

    def saved_bytes(self) -> int:
        """Weights and moments of what is trained."""
        trained = [model for model in self.models if model.instance.is_trained]
        return sum(model.trained_bytes() + model.optimizer_bytes() for model in trained)

    def _share(self, model: ModelMemory) -> int:
        """A rank's share of the weights that it holds of a model to train or score with it."""
        part = model.part
        held = part.weight_bytes(FLOAT32_BYTES, model.block) * (not model.guest.trains)
        return -(-(held + part.num_adapter_parameters * FLOAT32_BYTES) // model.shards)

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
                moments.append(kept | {"weights being read": min(READ_BYTES, share)} | self._packing(model))
            else:
                moments.append({"weights": before} | {"whole weights": whole * (not model.guest.trains)})
            before += share * self.is_cpu * (not self._is_away(model.sleeps))
            if model.has_base_beside and not model.engine.keeps_weights:
                base = model.adapted_bytes()
                kept = {"weights": before + base} if self.is_cpu else {}
                moments.append(kept | {"weights being read": min(READ_BYTES, base)} | self._packing(model))
                before += base * self.is_cpu
        return max(moments, key=lambda parts: sum(parts.values()))

    def _packing(self, model: ModelMemory) -> Parts:
        """The numbers of a weight until it is packed, and copies of some of them."""
        largest = max((one.inputs * one.outputs for one in model.size.linears), default=0) * FLOAT32_BYTES
        return {"weight being packed": largest + PACKING_BYTES} if model.block else {}

    def resident(self, model: ModelMemory) -> Iterator[tuple[str, int]]:
        """Weights or a share of them, the optimizer, and what engines keep."""
        role = model.instance.role
        if model.instance.is_engine_only:
            yield f"{role} engine's weights", model.sent_bytes() if model.guest.generates else model.engine_bytes()
        elif not model.is_shared:
            if not self._is_away(model.sleeps):
                yield f"{role} weights", self._share(model)
            if model.has_base_beside and not model.engine.keeps_weights:
                yield f"{role} engine's base", model.adapted_bytes()
        if model.instance.is_trained and not self._is_away(model.optimizer.offload):
            yield f"{role} optimizer", model.optimizer_bytes()
        if (engine := self._engine(model)).stays:
            sent = model.sent_bytes() if model.has_adapters else model.size.num_parameters * model.width
            yield f"{role} engine asleep", sent + sum(engine.kept().values())

    def _is_away(self, place: Offload) -> bool:
        """Whether what is offloaded to some place is elsewhere: memory of the host is that of a CPU."""
        return place == "disk" or (place == "host" and not self.is_cpu)

    def offloaded(self, where: Offload) -> Parts:
        """What optimizers keep, weights that are only scored, and inputs of layers."""
        parts, on_host = Parts(), where == "host"
        for model in self.models:
            role, trains = model.instance.role, model.instance.is_trained
            if trains and model.optimizer.offload == where:
                size = model.optimizer_bytes()
                parts[f"{role} optimizer"] = self._pinned_bytes(size, model) if on_host else size
            if model.sleeps == where:
                parts[f"{role} weights"] = (
                    self._pinned_bytes(self._share(model), model) if on_host else self._share(model)
                )
            if trains and model.config.offload_activations and on_host != self.is_cpu:
                work = self._pass(model, -(-self.recipe.batch.prompts_per_step // self.recipe.batch.parts_per_step))
                inputs = work.tokens * model.input_values() * min(model.num_ahead, work.number) * model.width
                parts[f"{role} inputs of layers"] = inputs
        return parts

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
            # An iteration begins when another one has room: of `capacity` copies of weights, the oldest is gone. Pinned
            # memory is kept for the next one.
            count, name = channel.capacity - self._frees(channel), f"{channel.kind} in flight"
            if count:
                parts[name] = parts.get(name, 0) + count * self._bytes_in_flight(channel)
        parts |= self._bases()
        arriving = [self._pinned_bytes(model.sent_bytes(), model) for model in self.models if self._is_fed(model)]
        return parts | ({"weights that arrive": sum(arriving)} if arriving else {})

    def leaving(self) -> Parts:
        """The copy of new weights that is sent while a run is evaluated or saved."""
        size = sum(self._bytes_in_flight(channel) for channel in self.pushed if self._frees(channel))
        return {"weights being sent": size} if size else {}

    def _frees(self, channel: Channel) -> bool:
        """Whether memory of what is sent through a channel is returned to the system before an iteration trains."""
        return self.is_cpu and channel.sync is not None

    def _bytes_in_flight(self, channel: Channel) -> int:
        """Bytes of an iteration in a channel: of rows, or of a copy of this rank's share of weights."""
        if channel.sync is None:
            return channel.max_bytes
        role = channel.sync.role
        model = next(x for x in self.models if x.instance.role == role and x.instance.is_trained)
        sent = model.part.num_trained if model.adds_adapters else model.part.num_parameters
        return self._pinned_bytes(-(-sent * model.width // model.shards), model)

    def _bases(self) -> Parts:
        """Weights from which differences are sent, and to which they are added, if `rollout.weights` may mean these.

        A rank that trains keeps its share once for each pool of engines, and one with an engine its share of what the
        pool receives. A native engine has the weights itself, and for those that may start again there are copies in
        any case.
        """
        sent = received = 0
        for model in self.models:
            takers = [x.instance for x in self.everywhere if x.instance.role == model.instance.role]
            takers = [one for one in takers if one.is_engine_only and self._sends_differences(one)]
            if model.instance.is_trained:
                share = -(-model.part.num_parameters * model.width // model.shards)
                sent += len(takers) * self._pinned_bytes(share, model)
            elif model.instance in takers and not (
                model.instance.engine == "native" or model.engine.restarts_on(model.instance.serving_layout)
            ):
                received += -(-model.sent_bytes() // len(model.instance.layout.ranks))
        found = {"weights sent last": sent, "weights received last": received}
        return {name: size for name, size in found.items() if size}

    def _sends_differences(self, taker: RoleInstance) -> bool:
        config, recipe = self.recipe.model_of(taker.role), self.recipe.as_seen_by(taker.role)
        is_on_host = self.is_cpu or any(channel.feeds(taker) for channel in (*self.pushed, *self.pulled))
        return config is not None and may_send_differences(recipe.rollout, taker.engine, config, is_on_host=is_on_host)

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
        return any(channel.feeds(model.instance) for channel in self.pulled)

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
            values = engine.num_sequences * engine.longest * size.compressed_values_per_token
            cache = int(values * model.cache_width)
            states = engine.num_sequences * size.state_bytes(model.width)
            spanned = model.instance.serving_layout.tp * model.instance.serving_layout.pp
            parts = size.num_kv_parts(model.instance.serving_layout)
            if model.engine.is_elsewhere:
                yield {} if self.is_cpu else self._travel(model)
                return
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
            "weights that slept": self._share(model) * self._is_away(model.sleeps),
            "gathered weights": model.gathered_bytes(),
            "converted experts": model.converted_bytes(1),
            "activations": max(tokens * held * model.width, seen * model.vision.held_values() * model.width),
            "pixels": seen * model.vision.pixel_bytes(model.width),
            "copies for attention": model.copied_bytes(work),
            **_unpacked(model),
            **self._chosen(model, work, has_gradient=False),
            **_states(model.state_bytes(work, num_layers=1)),
            "logits": self._chunk(size, tokens) * 3 * FLOAT32_BYTES * model.has_logits,
        }

    def _training(self, model: ModelMemory) -> Iterator[Parts]:
        """Memory is fullest in the backward pass: of the head, of the last layer, or when it ends."""
        batch, size, width = self.recipe.batch, model.part, model.width
        prompts = -(-batch.prompts_per_step // batch.parts_per_step)
        work = self._pass(model, prompts)
        tokens, num_passes, copied = work.tokens, work.number, model.copied_bytes(work)
        all_copied, is_kept = model.all_copied_bytes(work), not model.config.gradient_checkpointing
        seen = self._seen(model, tokens, prompts)
        states = model.state_bytes(work, num_layers=1 if model.config.gradient_checkpointing else None)
        gradients, num_held = model.gradient_bytes(), min(model.num_ahead, num_passes)
        kept = (num_held - 1) * all_copied * is_kept  # of other micro-batches
        gathered, embedding = model.gathered_bytes(), size.vocab_size * size.hidden_size
        chunk = self._chunk(size, tokens)
        logits = (
            chunk * 3 * FLOAT32_BYTES + min(tokens * size.vocab_size, self.bounds.max_logits // chunk * chunk) * width
        )
        head = embedding * FLOAT32_BYTES + (embedding * width if width != FLOAT32_BYTES else 0)
        moving = model.moving_values()
        before = tokens * (model.kept_values() * num_held + moving) + seen * model.vision.kept_values(
            gradient_checkpointing=model.config.gradient_checkpointing
        )
        begins = {
            "gathered weights": gathered,
            # The backward pass of a layer needs them as they were.
            "converted experts": model.converted_bytes(1 if model.config.gradient_checkpointing else size.num_layers),
            "activations": before * width,
            "pixels": seen * model.vision.pixel_bytes(model.width),
            "copies for attention": kept + all_copied * is_kept,
            **_states(states * (num_held if not model.config.gradient_checkpointing else 1)),
            **_unpacked(model),
            "gradients": gradients if num_passes > 1 else 0,
            **self._taught(tokens),
        }
        scored = {
            "logits": logits * model.has_logits,
            "gradient of the head": head * (model.has_logits and not model.has_adapters),
        }
        made = model.layer_values() * model.config.gradient_checkpointing + 3 * size.intermediate_size
        inner = {  # in the first layer that goes backward
            "activations": (before + tokens * made) * width,
            "copies for attention": kept + all_copied,
            "gradients of attention": model.attention_bytes(work, is_begin=True),
            **self._chosen(model, work, has_gradient=True),
            "dropout of adapters": model.dropped_bytes(tokens),
        }
        if self.is_cpu:  # whose allocator keeps what one of them has released
            yield begins | scored | inner
        else:
            yield begins | scored
            # The gradient of the head waits for the embedding's, which may be the same.
            yield begins | inner | {"gradient of the head": embedding * width * (scored["gradient of the head"] > 0)}
        rooms = model.room_bytes() * (model.optimizer.offload != "none" and not self.is_cpu)
        if (matrices := model.whole_matrix_bytes()) or rooms:
            found = {"gradients": model.trained_bytes(), "whole matrices": matrices, "rooms for the optimizer": rooms}
            yield {name: size for name, size in found.items() if size}
        # A unit's whole gradient as it was computed, and in float32 on its way to the ranks that hold its parts; gloo
        # sums in a copy of its own.
        largest_unit = max(2 * model.num_gathered_per_layer, size.num_root_parameters)
        if model.has_adapters:
            largest_unit, embedding = 2 * size.num_trained // size.num_layers, 0
        sent = FLOAT32_BYTES * (2 if self.is_cpu and model.shards > 1 else 1)
        # A pass adds the embedding's gradient to that of earlier ones. If it is the head, too, the head's waits for it.
        num_summed = 2 if num_passes > 1 and size.is_tied and model.has_logits else 1
        yield {
            "gathered weights": size.num_root_parameters * width if gathered else 0,
            "activations": tokens * (model.kept_values() * (num_held - 1) + moving + model.layer_values()) * width,
            "copies for attention": kept + copied,
            **_unpacked(model),
            "gradients of attention": model.attention_bytes(work, is_begin=False),
            **self._chosen(model, work, has_gradient=True),
            "dropout of adapters": model.dropped_bytes(tokens),
            "gradients": gradients if num_passes > 1 else model.trained_bytes(),
            "gradients being summed": largest_unit * (width + sent)
            if gathered
            else num_summed * embedding * FLOAT32_BYTES,
        }

    def _taught(self, tokens: int) -> Parts:
        """What teachers that read the same pass leave for their student: hidden states and gathered weights."""
        teachers = [one for one in self.models if one.instance.teaches]
        states = sum(tokens * one.size.hidden_size * one.width for one in teachers)
        weights = sum(one.gathered_bytes() + self._share(one) * self._is_away(one.sleeps) for one in teachers)
        return {"hidden states of teachers": states, "weights of teachers": weights} if teachers else {}

    def _chosen(self, model: ModelMemory, work: PassMemory, *, has_gradient: bool) -> Parts:
        """Memory for attention to keys that are chosen, where they are."""
        size = model.indexed_bytes(work, is_cpu=self.is_cpu, has_gradient=has_gradient)
        return {"attention to chosen keys": size} if size else {}

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
        sequences, longest = families * (1 + siblings), data.max_prompt_tokens + response - 1
        copies = families * siblings * data.max_prompt_tokens * (siblings > 1)
        if model.part.indexer is None and (self.is_cpu or model.instance.layout.cp > 1):
            return PassMemory(tokens, number, states=sequences)
        return PassMemory(tokens, number, copies, sequences, longest, sequences)

    def _chunk(self, size: ModelSize, tokens: int) -> int:
        """Logits that are computed at the same time."""
        most = CPU_MAX_LOGITS if self.is_cpu else self.bounds.max_logits
        return min(tokens * size.vocab_size, max(most, size.vocab_size))

    def commands(self, libraries: Parts, resumed: Parts) -> Mapping[str, Parts]:
        """A run that is resumed, and other commands with the model that answers, on one rank."""
        model = next((x for x in self.models if not x.instance.is_critic), self.models[0])
        weights, own = (model.size.weight_bytes(FLOAT32_BYTES, block) for block in (0, model.block))
        has_own = model.width != FLOAT32_BYTES or (model.has_adapters and model.engine.takes_adapters)
        copy = model.size.weight_bytes(model.width, model.block if model.adds_adapters else 0) * has_own
        engine = EngineMemory(
            self.recipe, model, self.bounds.cache, self.is_cpu, self.bounds.max_sequences, is_served=True
        )
        serve = {"weights": own, "unsharded weights": copy, **engine.fullest()}
        # An export is written tensor by tensor, straight from the weights.
        others = {"resume": resumed, "export": {**libraries, "weights": weights}} if self.is_cpu else {}
        return others | {"serve": {**libraries, **serve}}
