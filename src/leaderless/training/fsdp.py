"""The back end `fsdp`: language models and value models whose weights are sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from leaderless.config import RecipeError
from leaderless.data.batch import Batch, Jagged
from leaderless.models.attention import Attention
from leaderless.models.causal_lm import CausalLM, TokenOutputs, empty_causal_lm
from leaderless.models.context_parallel import ContextParallel
from leaderless.models.decoder import Decoder, ValueModel
from leaderless.models.experts import num_experts
from leaderless.models.image_readers import Pixels
from leaderless.models.lora import share_weights, without_adapters
from leaderless.models.opened import Opened, open_model
from leaderless.models.pipeline import PipelineParallel, check_stages, cut_into_stages
from leaderless.models.ring import RingParallel
from leaderless.models.scoring import Entropy
from leaderless.models.tensor_parallel import TensorParallel
from leaderless.models.vision import VisionLM
from leaderless.planner.backends import check_divides, check_experts
from leaderless.planner.layout import BACK
from leaderless.training.bodies import make_body_engine
from leaderless.training.engine import EngineSetup, TrainEngine
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.sharded import Model_co, ShardedModel


class FsdpEngine(ShardedModel[CausalLM]):
    """See `TrainEngine`."""

    def log_probs(self, batch: Batch) -> Jagged:
        """See `TrainEngine`."""
        return self.scores(batch, lambda micro_batch: self.forward(micro_batch, "none").log_probs)

    def balance_experts(self, batch: Batch, coefficient: float) -> None:
        """See `RoutedEngine`."""
        with self.routed.counting():
            self.log_probs(batch)
            self.routed.pull(self.routed.loads(), coefficient)

    def base(self) -> TrainEngine:
        """See `AdaptedEngine`."""
        return cast("TrainEngine", _Base(self))

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        """See `TrainEngine`."""
        if self.line is not None and not self.line.stages.is_last:
            log_probs, *others = self.line.results(micro_batch, self.hidden_states, 1 + (entropy != "none"))
            return TokenOutputs(log_probs, others[0] if others else log_probs[:0])
        part = _Part(self, micro_batch)
        targets, temperature = part.of(micro_batch.targets), micro_batch.temperature
        if isinstance(temperature, Tensor):
            temperature = part.of(temperature).to(self.device)
        targets = _at_least_one(targets).to(self.device)
        outputs: TokenOutputs = self.model(
            *part.inputs(), targets, temperature, entropy, *self._images(part, micro_batch)
        )
        self.routed.end()
        entropies = outputs.entropies if entropy == "none" else part.gather(outputs.entropies)
        found = TokenOutputs(part.gather(outputs.log_probs), entropies)
        if self.line is not None:
            self.line.publish([found.log_probs] if entropy == "none" else [found.log_probs, found.entropies])
        return found

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Pass a micro-batch through a stage of a pipeline that is not the last."""
        part = _Part(self, micro_batch)
        return cast("Tensor", self.model(*part.inputs(), None, 1.0, "none", *self._images(part, micro_batch)))

    def _images(self, part: _Part, micro_batch: MicroBatch) -> tuple[Pixels, ...]:
        """The images of a part of a micro-batch, for a rank that sees them; none for models of text."""
        if self.line is not None and not self.line.stages.is_first:
            return ()
        pixels = self.model.pixels(micro_batch.images, micro_batch.tokens, micro_batch.origin_of)
        return () if pixels is None else (part.pixels(pixels).to(self.device),)


class _Base:
    """An engine that scores tokens without its adapters."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def log_probs(self, batch: Batch) -> Jagged:
        """See `TrainEngine`."""
        with without_adapters(self._engine.model):
            return self._engine.log_probs(batch)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


class FsdpValueEngine(ShardedModel[ValueModel]):
    """See `ValueEngine`."""

    def values(self, batch: Batch) -> Jagged:
        """See `ValueEngine`."""
        return self.scores(batch, self.forward)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """See `ValueEngine`."""
        if self.line is not None and not self.line.stages.is_last:
            (found,) = self.line.results(micro_batch, self.hidden_states, 1)
            return found
        part = _Part(self, micro_batch)
        values: Tensor = self.model(*part.inputs())
        self.routed.end()
        values = part.gather(values)
        if self.line is not None:
            self.line.publish([values])
        return values

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Pass a micro-batch through a stage of a pipeline that is not the last."""
        return cast("Tensor", self.model(*_Part(self, micro_batch).inputs()))


class _Part:
    """What this rank computes of a pass: all of it, or a part of its tokens."""

    def __init__(self, engine: ShardedModel[Model_co], micro_batch: MicroBatch) -> None:
        self._engine, self._micro_batch, self._peers = engine, micro_batch, engine.peers
        num_tokens = len(micro_batch.tokens)
        self._places = self._peers.places(micro_batch.select, num_tokens) if self._peers else []

    def of(self, values: Tensor) -> Tensor:
        """Of numbers for all selected tokens, [R], those of this part."""
        return values[self._places[self._peers.place]] if self._peers else values

    def inputs(self) -> tuple[Tensor, Tensor, Attention, Tensor]:
        """Tokens, positions, attention and selected tokens of the part."""
        self._engine.process_group.activity.beat()
        device, pass_, select = self._engine.device, self._micro_batch, self.of(self._micro_batch.select)
        tokens, families = pass_.tokens, pass_.families
        positions = self._engine.model.positions(pass_.positions, families, pass_.images)
        self._engine.routed.begin(pass_, self._peers.part if self._peers else lambda values: values)
        if self._peers is None:
            attention = self._engine.model.attention(families, device, self._engine.compute_dtype)
        else:
            tokens, positions = self._peers.part(tokens), self._peers.part(positions.t()).t()  # of images, [3, T]
            select = self._peers.within(select, len(tokens))
            attention = self._peers.attention(self._peers.padded(families), device, self._engine.compute_dtype)
        line = self._engine.line
        entering = tokens.to(device) if line is None or line.stages.is_first else line.enter(len(tokens))
        return entering, positions.to(device), attention, _at_least_one(select).to(device)

    def pixels(self, pixels: Pixels) -> Pixels:
        """Of the images of a pass, what stands at the tokens of this part."""
        if self._peers is None:
            return pixels
        num_tokens = len(self._micro_batch.tokens)
        read = self._peers.places(pixels.places, num_tokens)[self._peers.place]
        places = self._peers.within(pixels.places[read], len(self._peers.part(self._micro_batch.tokens)))
        return replace(pixels, places=places, read=read)

    def gather(self, results: Tensor) -> Tensor:
        """Results for all selected tokens, from those of this part."""
        results = results[: len(self.of(self._micro_batch.select))]
        return self._peers.gather(results, self._places) if self._peers else results


def make_engine(setup: EngineSetup) -> FsdpEngine | FsdpValueEngine:
    """Load a model and shard it over the ranks of its layout.

    Ranks along `pp` have some of the layers each, those along `tp` divide layers, and all others the weights of such a
    part; ranks along `cp` divide the tokens of a pass, too.

    Raises:
        RecipeError: The model cannot be loaded, or ranks along `tp` or `pp` cannot divide it.
    """
    if setup.body is not None:
        return cast("FsdpEngine | FsdpValueEngine", make_body_engine(setup))
    opened = _open(setup)
    model, key, layout = opened.decoder, f"models.{setup.role}", setup.layout
    if isinstance(model, VisionLM):
        able = ("dp",) if model.reads_both_ways else ("dp", "cp", "tp", "pp")
        if wrong := [axis for axis in layout.axes if axis not in (*able, "ep")]:
            reason = "that reads prompts in both directions" if model.reads_both_ways else "that sees images"
            raise RecipeError.at(
                key, f"a model {reason} cannot be divided along {', '.join(wrong)}: use {', '.join(able)}"
            )
    if layout.ep > 1:
        check_experts(key, setup.role, layout.ep, num_experts(model))
        model.divides_experts = True
    if layout.pp > 1:
        check_stages(model.model, opened.trial, layout.pp, key, has_adapters=setup.model.lora is not None)
    shapes = {name: weight.shape for name, weight in model.trained_weights()}
    mesh: DeviceMesh | None = None
    if layout.tp > 1:
        check_divides(key, setup.role, layout.tp, _sizes(model))
        TensorParallel.divide(model, setup.axis_groups["tp"], key)
    if layout.pp > 1:
        hidden_size = model.model.config.get_text_config().hidden_size
        groups = setup.axis_groups["pp"], setup.axis_groups[BACK]
        cut_into_stages(model, PipelineParallel(layout, *groups, shapes, hidden_size))
    if layout.tp * layout.pp > 1:
        mesh = setup.weight_mesh()
    if setup.is_reward_model and isinstance(model, ValueModel):
        model.become_reward_model(key)
    engine: FsdpEngine | FsdpValueEngine
    make = FsdpValueEngine if isinstance(model, ValueModel) else FsdpEngine
    engine = make(
        model,  # type: ignore[arg-type]
        setup.model,
        setup.process_group,
        setup.device,
        setup.micro_batch_tokens,
        optimizer=setup.optimizer,
        num_updates=setup.num_updates,
        mesh=mesh,
    )
    if setup.is_reward_model and isinstance(model, ValueModel):
        model.clear_offset()
    if layout.cp > 1:
        can_swap = _sizes(model)[0] // layout.tp % layout.cp == 0
        engine.divide_passes((ContextParallel if can_swap else RingParallel)(setup.axis_groups["cp"]))
    return engine


def _open(setup: EngineSetup) -> Opened:
    """The model, without values: ranks read their parts, or share those of a donor, once it is divided."""
    if setup.is_critic or not isinstance(setup.donor, FsdpEngine) or isinstance(setup.donor.model, VisionLM):
        return open_model(setup.model, setup.role, is_critic=setup.is_critic, num_ranks=len(setup.layout.ranks))
    model, donor = empty_causal_lm(setup.model, setup.role, has_adapters=True), setup.donor.model.model
    model.complete = lambda whole, device: share_weights(model.model, donor)  # noqa: ARG005
    return Opened(model, model.model, None)


def _sizes(model: Decoder) -> tuple[int, int, int]:
    """Attention heads, heads of keys and inner features; for families that do not say the latter, the heads again."""
    described = model.model.config.get_text_config()
    heads: int = described.num_attention_heads
    inner = getattr(described, "intermediate_size", None)
    return heads, getattr(described, "num_key_value_heads", None) or heads, inner if isinstance(inner, int) else heads


def _at_least_one(indices: Tensor) -> Tensor:
    """Indices, or that of the first token if there are none: a model always scores at least one token."""
    return indices if len(indices) else torch.zeros(1, dtype=torch.int64)
