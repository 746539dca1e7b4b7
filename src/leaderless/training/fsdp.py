"""The back end `fsdp`: language models and value models whose weights are sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.models.attention import Attention
from leaderless.models.causal_lm import CausalLM, TokenOutputs, load_causal_lm
from leaderless.models.context_parallel import ContextParallel
from leaderless.models.decoder import Decoder, ValueModel, load_value_model
from leaderless.models.scoring import Entropy
from leaderless.models.shared_prompts import attention_over
from leaderless.planner.backends import heads_do_not_divide
from leaderless.training.engine import EngineSetup
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.sharded import Model_co, ShardedModel


class FsdpEngine(ShardedModel[CausalLM]):
    """See `TrainEngine`."""

    def log_probs(self, batch: Batch) -> Jagged:
        """See `TrainEngine`."""
        return self.scores(batch, lambda micro_batch: self.forward(micro_batch, "none").log_probs)

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        """See `TrainEngine`."""
        part = _Part(self, micro_batch)
        targets, temperature = part.of(micro_batch.targets), micro_batch.temperature
        if isinstance(temperature, Tensor):
            temperature = part.of(temperature).to(self.device)
        targets = _at_least_one(targets).to(self.device)
        outputs: TokenOutputs = self.model(*part.inputs(), targets, temperature, entropy)
        entropies = outputs.entropies if entropy == "none" else part.gather(outputs.entropies)
        return TokenOutputs(part.gather(outputs.log_probs), entropies)


class FsdpValueEngine(ShardedModel[ValueModel]):
    """See `ValueEngine`."""

    def values(self, batch: Batch) -> Jagged:
        """See `ValueEngine`."""
        return self.scores(batch, self.forward)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """See `ValueEngine`."""
        part = _Part(self, micro_batch)
        values: Tensor = self.model(*part.inputs())
        return part.gather(values)


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
        tokens, positions, families = pass_.tokens, pass_.positions, pass_.families
        if self._peers is None:
            attention = attention_over(families, device, self._engine.compute_dtype)
        else:
            tokens, positions = self._peers.part(tokens), self._peers.part(positions)
            select = select - self._peers.place * len(tokens)
            whole = attention_over(self._peers.padded(families), device, self._engine.compute_dtype)
            attention = self._peers.attention(whole)
        return tokens.to(device), positions.to(device), attention, _at_least_one(select).to(device)

    def gather(self, results: Tensor) -> Tensor:
        """Results for all selected tokens, from those of this part."""
        results = results[: len(self.of(self._micro_batch.select))]
        return self._peers.gather(results, self._places) if self._peers else results


def make_engine(setup: EngineSetup) -> FsdpEngine | FsdpValueEngine:
    """Load a model and shard it over the ranks of its layout.

    Ranks along `cp` divide weights like those along `dp`, and the tokens of a pass.

    Raises:
        RecipeError: The model cannot be loaded, or its heads cannot be divided by the ranks along `cp`.
    """
    where = setup.model, setup.process_group, setup.device, setup.micro_batch_tokens
    mesh = setup.mesh() if set(setup.layout.axes) - {"dp", "cp"} else None
    engine: FsdpEngine | FsdpValueEngine
    if setup.is_critic:
        critic = load_value_model(setup.model, setup.role)
        engine = FsdpValueEngine(critic, *where, optimizer=setup.optimizer, num_updates=setup.num_updates, mesh=mesh)
    else:
        model = load_causal_lm(setup.model, setup.role)
        engine = FsdpEngine(model, *where, optimizer=setup.optimizer, num_updates=setup.num_updates, mesh=mesh)
    if setup.layout.cp > 1:
        _check_heads(engine.model, setup)
        engine.divide_passes(ContextParallel(setup.axis_groups["cp"]))
    return engine


def _check_heads(model: Decoder, setup: EngineSetup) -> None:
    heads, cp = model.model.config.get_text_config().num_attention_heads, setup.layout.cp
    if heads % cp:
        raise heads_do_not_divide(f"models.{setup.role}", setup.role, heads, cp)


def _at_least_one(indices: Tensor) -> Tensor:
    """Indices, or that of the first token if there are none: a model always scores at least one token."""
    return indices if len(indices) else torch.zeros(1, dtype=torch.int64)
