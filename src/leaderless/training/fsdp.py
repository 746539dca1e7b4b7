"""The back end `fsdp`: language models and value models whose weights are sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.models.attention import Attention
from leaderless.models.causal_lm import CausalLM, TokenOutputs, load_causal_lm
from leaderless.models.decoder import ValueModel, load_value_model
from leaderless.models.scoring import Entropy
from leaderless.models.shared_prompts import attention_over
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
        targets, count = _at_least_one(micro_batch.targets).to(self.device), len(micro_batch.targets)
        temperature = micro_batch.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.to(self.device)
        outputs: TokenOutputs = self.model(*_inputs(self, micro_batch), targets, temperature, entropy)
        return TokenOutputs(outputs.log_probs[:count], outputs.entropies[:count])


class FsdpValueEngine(ShardedModel[ValueModel]):
    """See `ValueEngine`."""

    def values(self, batch: Batch) -> Jagged:
        """See `ValueEngine`."""
        return self.scores(batch, self.forward)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """See `ValueEngine`."""
        values: Tensor = self.model(*_inputs(self, micro_batch))
        return values[: len(micro_batch.select)]


def make_engine(setup: EngineSetup) -> FsdpEngine | FsdpValueEngine:
    """Load a model and shard it over the ranks of its layout."""
    where = setup.model, setup.process_group, setup.device, setup.micro_batch_tokens
    mesh = setup.mesh() if setup.process_group.size > 1 else None
    if setup.is_critic:
        critic = load_value_model(setup.model, setup.role)
        return FsdpValueEngine(critic, *where, optimizer=setup.optimizer, num_updates=setup.num_updates, mesh=mesh)
    model = load_causal_lm(setup.model, setup.role)
    return FsdpEngine(model, *where, optimizer=setup.optimizer, num_updates=setup.num_updates, mesh=mesh)


def _inputs(engine: ShardedModel[Model_co], micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Attention, Tensor]:
    """Tokens, positions, attention and selected tokens of a pass."""
    engine.process_group.activity.beat()
    device = engine.device
    return (
        micro_batch.tokens.to(device),
        micro_batch.positions.to(device),
        attention_over(micro_batch.families, device, engine.compute_dtype),
        _at_least_one(micro_batch.select).to(device),
    )


def _at_least_one(indices: Tensor) -> Tensor:
    """Indices, or that of the first token if there are none: a model always scores at least one token."""
    return indices if len(indices) else torch.zeros(1, dtype=torch.int64)
