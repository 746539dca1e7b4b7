"""Training and scoring with sharded models: language models and value models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.device import trim_host_memory
from leaderless.models.causal_lm import CausalLM, TokenOutputs
from leaderless.models.scoring import Entropy
from leaderless.models.shared_prompts import attention_over
from leaderless.models.value_model import ValueModel
from leaderless.training.engine import TokenLoss, ValueLoss
from leaderless.training.micro_batches import MicroBatch, response_lengths
from leaderless.training.sharded import ShardedModel


class FsdpEngine(ShardedModel[CausalLM]):
    """See `TrainEngine`."""

    @torch.no_grad()
    def log_probs(self, batch: Batch, temperature: float) -> Jagged:
        """See `TrainEngine`."""
        lengths = response_lengths(batch.jagged("response_mask"))
        values = torch.empty(int(lengths.sum()), device=self.device)

        def score(micro_batches: Sequence[MicroBatch]) -> None:
            for micro_batch in micro_batches:
                with self.one_pass(micro_batch):
                    outputs = self._forward(micro_batch, temperature, "none")
                    values[micro_batch.response_index.to(self.device)] = outputs.log_probs

        self.run_passes(batch, score)
        self.reshard_root()
        return Jagged(values.cpu(), lengths, "response_tokens")

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        token_loss: TokenLoss,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> None:
        """See `TrainEngine`."""
        for micro_batch in micro_batches:
            with self.one_pass(micro_batch):
                outputs = self._forward(micro_batch, temperature, "gradient" if entropy_gradient else "value")
                _backward(token_loss(outputs, micro_batch), outputs.log_probs)

    def _forward(self, micro_batch: MicroBatch, temperature: float, entropy: Entropy) -> TokenOutputs:
        """What the model says of a micro-batch's targets."""
        self.process_group.activity.beat()
        count = len(micro_batch.targets)
        outputs: TokenOutputs = self.model(
            micro_batch.tokens.to(self.device),
            micro_batch.positions.to(self.device),
            attention_over(micro_batch.families, self.device, self.compute_dtype),
            _at_least_one(micro_batch.select).to(self.device),
            _at_least_one(micro_batch.targets).to(self.device),
            temperature,
            entropy,
        )
        return TokenOutputs(outputs.log_probs[:count], outputs.entropies[:count])

    @contextmanager
    def unsharded(self) -> Iterator[CausalLM]:
        """See `TrainEngine`."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield self.model
        finally:
            for unit in self.units:
                unit.set_reshard_after_forward(unit is not self.units[-1], recurse=False)
                unit.reshard()
            if self.units and self.device.type == "cpu":
                trim_host_memory()


class FsdpValueEngine(ShardedModel[ValueModel]):
    """See `ValueEngine`."""

    @torch.no_grad()
    def values(self, batch: Batch) -> Jagged:
        """See `ValueEngine`."""
        lengths = response_lengths(batch.jagged("response_mask"))
        values = torch.empty(int(lengths.sum()), device=self.device)

        def expect(micro_batches: Sequence[MicroBatch]) -> None:
            for micro_batch in micro_batches:
                with self.one_pass(micro_batch):
                    values[micro_batch.response_index.to(self.device)] = self._forward(micro_batch)

        self.run_passes(batch, expect)
        self.reshard_root()
        return Jagged(values.cpu(), lengths, "response_tokens")

    def forward_backward(self, micro_batches: Sequence[MicroBatch], value_loss: ValueLoss) -> None:
        """See `ValueEngine`."""
        for micro_batch in micro_batches:
            with self.one_pass(micro_batch):
                values = self._forward(micro_batch)
                _backward(value_loss(values, micro_batch), values)

    def _forward(self, micro_batch: MicroBatch) -> Tensor:
        """[R] float32: the value before each of a micro-batch's targets."""
        self.process_group.activity.beat()
        values: Tensor = self.model(
            micro_batch.tokens.to(self.device),
            micro_batch.positions.to(self.device),
            attention_over(micro_batch.families, self.device, self.compute_dtype),
            _at_least_one(micro_batch.select).to(self.device),
        )
        return values[: len(micro_batch.select)]


def _at_least_one(indices: Tensor) -> Tensor:
    """Without targets a model is asked about one token all the same."""
    return indices if len(indices) else torch.zeros(1, dtype=torch.int64)


def _backward(loss: Tensor, outputs: Tensor) -> None:
    """A pass that nothing is asked of still has to go through every collective of the backward pass."""
    (loss + 0.0 * outputs.sum()).backward()  # type: ignore[no-untyped-call]
