"""The back end `fsdp`: language models and value models whose weights are sharded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from leaderless.algorithms.divergences import Divergence
from leaderless.config import RecipeError
from leaderless.data.batch import Batch, Jagged
from leaderless.models.attention.blocks import Repeats
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.recurrence_kernels import try_kernels
from leaderless.models.attention.ring import RingParallel
from leaderless.models.causal_lm import CausalLM, HeadInputs, Question, TokenOutputs, empty_causal_lm
from leaderless.models.compiled_layers import compile_layers, compiler_failure, why_not_compiled
from leaderless.models.decoder import Decoder
from leaderless.models.divergence_scores import Lesson, TeacherHead, TeacherWords
from leaderless.models.fused_scores import compile_scores, scores_failure
from leaderless.models.loading.sharded_loading import ShardedModelFiles, open_model
from leaderless.models.lora.dropout import Dropout, DroppingAttention
from leaderless.models.lora.linear import is_adapter, share_weights, without_adapters
from leaderless.models.parallel.context import ContextParallel
from leaderless.models.parallel.expert import ExpertParallel, num_experts
from leaderless.models.parallel.pipeline import PipelineParallel, check_stages, cut_into_stages
from leaderless.models.parallel.tensor import TensorParallel
from leaderless.models.routers import FAMILIES, Routers
from leaderless.models.sampling_support import Support
from leaderless.models.scoring import Entropy
from leaderless.models.uploads import one_copy, placed
from leaderless.models.value_model import ValueModel
from leaderless.models.vision.image_readers import Pixels
from leaderless.models.vision.vision_models import VisionDecoder, VisionLM
from leaderless.planner.checks.capabilities import check_divides, check_experts
from leaderless.planner.graph.adapters import lora_of
from leaderless.planner.layout import BACK, EXPERTS
from leaderless.training.engine import EngineSetup, ReadTeacher, TrainEngine
from leaderless.training.micro_batches import MicroBatch, token_keys
from leaderless.training.sharded import ShardedModel
from leaderless.training.weight_sharding import WeightSharding

OfTokens = TypeVar("OfTokens", Tensor, Support, TeacherWords)


class FsdpEngine(ShardedModel[CausalLM]):
    """A language model that is trained and scored under FSDP."""

    def log_probs(self, batch: Batch) -> Jagged:
        """Log-probabilities of the sampled tokens, by passes without entropies."""
        return self.scores(batch, lambda micro_batch: self.forward(micro_batch, "none").log_probs)

    def balance_experts(self, batch: Batch, coefficient: float) -> None:
        """Count the loads in a pass over the batch, and add their gradient in the passes that follow."""
        if self.routed is None:
            raise RuntimeError(
                "algorithm.expert_balance is set, but the model has no experts that are known: it can be of the "
                f"families {FAMILIES}; leave it out"
            )
        with self.routed.counting():
            self.log_probs(batch)
            self.routed.pull(self.routed.loads(), coefficient)

    def base(self) -> TrainEngine:
        """The same model with its adapters switched off while it scores."""
        return cast("TrainEngine", _Base(self))

    def likeliest_words(self, batch: Batch, how_many: int, temperature: float) -> Jagged:
        """Likeliest words at the sampled tokens, by passes in place of scores."""
        question = Question(how_many, temperature)
        return self.scores(batch, lambda one: cast("Tensor", self._ask(one, question)[0]), (2, how_many + 1))

    @contextmanager
    def teaching(self, micro_batch: MicroBatch) -> Iterator[ReadTeacher]:
        """What this model finds at a micro-batch; its head stays gathered as long as this lasts."""
        with self._weights_here():
            with torch.no_grad():
                found, places = self._ask(micro_batch, Question(None, 1.0))
            assert isinstance(found, HeadInputs)
            bias = found.bias if len(found.bias) else None
            yield ReadTeacher(TeacherHead(found.hidden, found.weight, bias, self.model.logit_form), places)
        self.end_passes(is_done=True)

    def _ask(self, micro_batch: MicroBatch, question: Question) -> tuple[Tensor | HeadInputs, Tensor]:
        """The answer of the model to a question about a micro-batch, and the tokens that this rank computes."""
        part = _Part(self, micro_batch)
        with one_copy(self.device):
            targets = placed(_at_least_one(part.of(micro_batch.targets)), self.device)
            inputs, images = part.inputs()
        found: Tensor | HeadInputs = self.model(*inputs, targets, 1.0, "none", *images, question=question)
        if self.routed is not None:
            self.routed.end()
        own = part.of(torch.arange(len(micro_batch.targets)))
        return part.gather(found) if isinstance(found, Tensor) else found, own

    def forward(
        self,
        micro_batch: MicroBatch,
        entropy: Entropy = "value",
        divergence: Divergence | None = None,
        teacher: ReadTeacher | None = None,
    ) -> TokenOutputs:
        """Score a micro-batch; the last stage of a pipeline computes the logits and sends the others its results."""
        if self.line is not None and not self.line.stages.is_last:
            log_probs, *others = self.line.results(micro_batch, self.hidden_states, 1 + (entropy != "none"))
            return TokenOutputs(log_probs, others[0] if others else log_probs[:0])
        part, temperature = _Part(self, micro_batch), micro_batch.temperature
        with one_copy(self.device):
            targets = placed(_at_least_one(part.of(micro_batch.targets)), self.device)
            if isinstance(temperature, Tensor):
                temperature = placed(part.of(temperature), self.device)
            inputs, images = part.inputs()
        limits = {} if micro_batch.support is None else part.limits(micro_batch.support)
        lesson = {} if divergence is None else {"lesson": Lesson(divergence, part.taught(teacher))}
        outputs: TokenOutputs = self.model(*inputs, targets, temperature, entropy, *images, **limits, **lesson)
        if self.routed is not None:
            self.routed.end()
        entropies = outputs.entropies if entropy == "none" else part.gather(outputs.entropies)
        divergences = outputs.divergences if divergence is None else part.gather(outputs.divergences)
        found = TokenOutputs(part.gather(outputs.log_probs), entropies, divergences)
        if self.line is not None:
            self.line.publish([found.log_probs] if entropy == "none" else [found.log_probs, found.entropies])
        return found

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Pass a micro-batch through a stage of a pipeline that is not the last."""
        inputs, images = _Part(self, micro_batch).inputs()
        hidden: Tensor = self.model(*inputs, None, 1.0, "none", *images)
        return hidden if self.routed is None else self.routed.leave(hidden)


class _Base:
    """An engine that scores tokens without its adapters."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def log_probs(self, batch: Batch) -> Jagged:
        """Log-probabilities with the adapters switched off."""
        with without_adapters(self._engine.model):
            return self._engine.log_probs(batch)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


class FsdpValueEngine(ShardedModel[ValueModel]):
    """A value model that is trained and scored under FSDP."""

    def values(self, batch: Batch) -> Jagged:
        """Value before each sampled token, without gradient."""
        return self.scores(batch, self.forward)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Values of a micro-batch; only the last stage of a pipeline computes them, and sends them to the others."""
        if self.line is not None and not self.line.stages.is_last:
            (found,) = self.line.results(micro_batch, self.hidden_states, 1)
            return found
        part = _Part(self, micro_batch)
        inputs, images = part.inputs()
        values: Tensor = self.model(*inputs, *images)
        if self.routed is not None:
            self.routed.end()
        values = part.gather(values)
        if self.line is not None:
            self.line.publish([values])
        return values

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Pass a micro-batch through a stage of a pipeline that is not the last."""
        inputs, images = _Part(self, micro_batch).inputs()
        hidden: Tensor = self.model(*inputs, *images)
        return hidden if self.routed is None else self.routed.leave(hidden)


class _Part:
    """Part of a pass that this rank computes: all of it, or a part of its tokens."""

    def __init__(self, engine: ShardedModel[CausalLM] | ShardedModel[ValueModel], micro_batch: MicroBatch) -> None:
        self._engine, self._micro_batch, self._peers = engine, micro_batch, engine.peers
        num_tokens = len(micro_batch.tokens)
        self._places = self._peers.places(micro_batch.select, num_tokens) if self._peers else []
        self._order = torch.empty(0, dtype=torch.int64)  # all of these places, on the device

    def of(self, values: OfTokens) -> OfTokens:
        """Numbers for this part, from numbers for all selected tokens, [R]."""
        return values[self._places[self._peers.place]] if self._peers else values

    def limits(self, support: Support) -> Mapping[str, Support]:
        """The support of this part's tokens, as an argument of a model; none without tokens."""
        own = self.of(support)
        return {"support": own} if len(own.sizes) else {}

    def taught(self, teacher: ReadTeacher | None) -> TeacherWords | TeacherHead:
        """The teacher of this part's tokens: one that has read them, or the words that came with the micro-batch."""
        if teacher is not None:
            if not torch.equal(teacher.places, self.of(torch.arange(len(self._micro_batch.targets)))):
                raise RuntimeError(
                    "along cp, ranks divide the tokens of the teacher otherwise than those of the student, as its "
                    "heads of attention are not so many: set algorithm.distillation.top_k"
                )
            return teacher.head
        words = self._micro_batch.teacher
        if words is None or not len(self.of(words.sizes)):
            none = torch.zeros(0)
            return TeacherWords(none.long(), none, torch.zeros(1, dtype=torch.int64))
        return self.of(words)

    def inputs(self) -> tuple[tuple[Tensor, Tensor, Attention, Tensor | Repeats], tuple[Pixels, ...]]:
        """Tokens, positions, attention and selected tokens of the part, and its images, all in one copy."""
        with one_copy(self._engine.device):
            if self._peers is not None:
                self._order = placed(torch.cat(self._places), self._engine.device)
            return self._inputs(), self._images()

    def _inputs(self) -> tuple[Tensor, Tensor, Attention, Tensor | Repeats]:
        self._engine.process_group.activity.beat()
        device, pass_, select = self._engine.device, self._micro_batch, self.of(self._micro_batch.select)
        tokens, families = pass_.tokens, pass_.families
        positions = self._engine.model.positions(pass_.positions, families, pass_.images)
        if self._engine.routed is not None:
            self._engine.routed.begin(pass_, self._peers.part if self._peers else lambda values: values)
        elif pass_.experts is not None:
            raise RuntimeError("choices of experts were recorded, but the model that replays them has none")
        if self._peers is None:
            attention = self._engine.model.attention(families, device, self._engine.compute_dtype)
        else:
            tokens, positions = self._peers.part(tokens), self._peers.part(positions.t()).t()  # of images, [3, T]
            select = self._peers.within(select, len(tokens))
            attention = self._peers.attention(self._peers.padded(families), device, self._engine.compute_dtype)
        attention = self._dropping(attention)
        line = self._engine.line
        entering = placed(tokens, device) if line is None or line.stages.is_first else line.enter(len(tokens))
        return entering, placed(positions, device), attention, self._selected(_at_least_one(select), len(tokens))

    def _selected(self, select: Tensor, num_tokens: int) -> Tensor | Repeats:
        """Selected tokens: the last one of a prompt once for each continuation."""
        device = self._engine.device
        if device.type == "cpu" or not torch.is_grad_enabled():
            return placed(select, device)
        return Repeats(select, num_tokens, device)

    def _images(self) -> tuple[Pixels, ...]:
        """The images of the part, for a rank that sees them; none for models of text."""
        line, pass_ = self._engine.line, self._micro_batch
        if line is not None and not line.stages.is_first:
            return ()
        pixels = self._engine.model.pixels(pass_.images, pass_.tokens, pass_.origin_of)
        if pixels is not None and self._peers is not None:
            read = self._peers.places(pixels.places, len(pass_.tokens))[self._peers.place]
            places = self._peers.within(pixels.places[read], len(self._peers.part(pass_.tokens)))
            pixels = replace(pixels, places=places, read=read)
        return () if pixels is None else (pixels.to(self._engine.device),)

    def _dropping(self, attention: Attention) -> Attention:
        """The attention of a pass, with the dropout of adapters if the pass has a gradient."""
        rate, engine = self._engine.dropout, self._engine
        if not (rate and torch.is_grad_enabled()):
            return attention
        keys = token_keys(self._micro_batch, engine.seed, engine.policy_version)
        keys = self._peers.part(keys) if self._peers else keys
        return DroppingAttention(attention, Dropout(placed(keys, engine.device), rate))

    def gather(self, results: Tensor) -> Tensor:
        """Results for all selected tokens, from the results of this part."""
        results = results[: len(self.of(self._micro_batch.select))]
        return self._peers.gather(results, self._places, self._order) if self._peers else results


def make_engine(setup: EngineSetup) -> FsdpEngine | FsdpValueEngine:
    """Load a model and shard it over the ranks of its layout.

    Ranks along `pp` have some of the layers each, those along `tp` divide layers, and all others the weights of such a
    part; ranks along `cp` divide the tokens of a pass, too.

    Raises:
        RecipeError: The model cannot be loaded, or ranks along `tp` or `pp` cannot divide it.
    """
    opened = _open(setup)
    model, key, layout = opened.decoder, f"models.{setup.role}", setup.layout
    if isinstance(model, VisionDecoder):
        able = ("dp",) if model.reads_both_ways else ("dp", "cp", "tp", "pp")
        if wrong := [axis for axis in layout.axes if axis not in (*able, "ep")]:
            reason = "that reads prompts in both directions" if model.reads_both_ways else "that sees images"
            raise RecipeError.at(
                key, f"a model {reason} cannot be divided along {', '.join(wrong)}: use {', '.join(able)}"
            )
    if layout.cp > 1 and any(kind.is_recurrent for kind in model.attention_kinds):
        raise RecipeError.at(
            key, f"layers that read by recurrence cannot be divided along cp={layout.cp}: leave out cp"
        )
    axis = next((axis for axis in ("cp", "pp") if getattr(layout, axis) > 1), None)
    if axis is not None and any(kind.is_indexed for kind in model.attention_kinds):
        raise RecipeError.at(
            key, f"layers with an indexer, which chooses keys, cannot be divided along {axis}: leave out {axis}"
        )
    num_heads = _sizes(model)[0] if layout.cp > 1 else 1
    can_swap = num_heads // layout.tp % layout.cp == 0
    if layout.cp > 1 and not can_swap and not all(kind.sees_all for kind in model.attention_kinds):
        raise RecipeError.at(
            key,
            f"layers with a window or chunks cannot be divided along cp={layout.cp}, which does not divide the "
            f"{num_heads // layout.tp} heads of attention on a rank: choose a divisor",
        )
    if layout.pp > 1:
        check_stages(model.model, opened.trial, layout.pp, key)
    try_kernels(model.model, setup.device, getattr(torch, setup.model.compute_dtype))
    _divide(model, setup, key)
    why_not_compiled = _compile(model, setup, key)
    mesh = setup.weight_mesh() if layout.tp * layout.pp > 1 else None
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
        division=WeightSharding(
            mesh, setup.sharding.keeps, setup.sharding.offload_folder, setup.sharding.offload_frozen
        ),
    )
    engine.seed, engine.why_not_compiled = setup.seed, why_not_compiled
    if isinstance(model, CausalLM):
        model.max_logits = setup.sharding.max_logits
    if setup.is_reward_model and isinstance(model, ValueModel):
        model.clear_offset()
    if layout.cp > 1:
        engine.divide_passes((ContextParallel if can_swap else RingParallel)(setup.axis_groups["cp"]))
    return engine


def _divide(model: Decoder, setup: EngineSetup, key: str) -> None:
    """Leave a rank its part of a model: its experts, its part of each layer, and the layers of its stage."""
    layout, groups = setup.layout, setup.axis_groups
    shapes = {name: weight.shape for name, weight in model.trained_weights()}
    base_shapes = {name: one.shape for name, one in model.model.named_parameters() if not is_adapter(name)}
    if layout.ep > 1:
        check_experts(key, setup.role, layout.ep, num_experts(model))
        sharers = groups["tp"] if layout.tp > 1 else None
        ExpertParallel.divide(model, groups[EXPERTS], setup.expert_mesh(), sharers, key)
    if layout.tp > 1:
        check_divides(key, setup.role, layout.tp, _sizes(model))
        TensorParallel.divide(model, groups["tp"], key)
    if layout.pp > 1:
        hidden_size = model.model.config.get_text_config().hidden_size
        model.routers = Routers.of(model)  # of all stages, each of which knows its own by their number
        lines, head = (groups["pp"], groups[BACK]), model.model.get_output_embeddings()
        has_tied_words = head is not None and head.weight is model.model.get_input_embeddings().weight
        is_tied = has_tied_words and setup.model.lora is None
        stages = PipelineParallel(layout, *lines, shapes, base_shapes, hidden_size, is_tied=is_tied)
        cut_into_stages(model, stages)


def _compile(model: Decoder, setup: EngineSetup, key: str) -> str:
    """Compile what a model computes if its ranks are to, and all of them can; returns why layers cannot be compiled."""
    if not (setup.sharding.compiles is True or (setup.sharding.compiles == "auto" and setup.device.type == "cuda")):
        return ""
    lora, dtype = lora_of(setup.model, key), getattr(torch, setup.model.compute_dtype)
    unfit = why_not_compiled(model, has_dropout=lora is not None and lora.dropout > 0)
    failure = compiler_failure(setup.device, dtype)
    has_scores = isinstance(model, CausalLM) and model.has_head and setup.device.type != "cpu"  # its caches suffice
    if has_scores and not failure:
        scored = cast("CausalLM", model)
        failure = scores_failure(setup.device, dtype, len(scored.head.weight), scored.logit_form.steepness)
    problems = setup.process_group.max(torch.tensor([bool(unfit), bool(failure)]).int(), "whether layers are compiled")
    if has_scores and not problems[1]:
        cast("CausalLM", model).fused_scores = compile_scores()
    if not problems.any():
        compile_layers(model)
    elif setup.sharding.compiles is True:
        reason = unfit or failure or "another rank cannot compile its layers"
        raise RecipeError.at("training.compile", f"role '{setup.role}' cannot have it, since {reason}: leave it out")
    elif failure:
        warnings.warn(f"training is slower, since torch.compile failed: {failure}", RuntimeWarning, stacklevel=2)
    return unfit


def _open(setup: EngineSetup) -> ShardedModelFiles:
    """The model, without values: ranks read their parts, or share a donor's values, once it is divided."""
    donor = setup.sharding.donor
    if setup.is_critic or not isinstance(donor, FsdpEngine) or isinstance(donor.model, VisionLM):
        return open_model(setup.model, setup.role, is_critic=setup.is_critic, num_ranks=len(setup.layout.ranks))
    model, given = empty_causal_lm(setup.model, setup.role, has_adapters=True), donor.model.model
    model.complete = lambda whole, device: share_weights(model.model, given)  # noqa: ARG005
    return ShardedModelFiles(model, None, None)


def _sizes(model: Decoder) -> tuple[int, int, int]:
    """Attention heads, heads of keys and inner features; for families that do not say the latter, the heads again.

    Where layers have different numbers of key heads, it is the number that divides all of them.
    """
    described = model.model.config.get_text_config()
    heads: int = described.num_attention_heads
    inner, layers = getattr(described, "intermediate_size", None), getattr(described, "per_layer_config", [described])
    key_heads = math.gcd(*(getattr(layer, "num_key_value_heads", None) or heads for layer in layers))
    return heads, key_heads, inner if isinstance(inner, int) else heads


def _at_least_one(indices: Tensor) -> Tensor:
    """Indices, or the first token's if there are none: a model always scores at least one token."""
    return indices if len(indices) else torch.zeros(1, dtype=torch.int64)
