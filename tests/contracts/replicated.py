"""A training back end as a user might write one: every rank has the whole model, and gradients are summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from leaderless import EngineSetup, train_backend
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.weights.blocks import LocalWeight
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.shared_prompts import attention_over
from leaderless.models.causal_lm import CausalLM, TokenOutputs, load_causal_lm
from leaderless.models.decoder import Decoder
from leaderless.models.scoring import Entropy
from leaderless.models.value_model import ValueModel, load_value_model
from leaderless.training.engine import UpdateInfo
from leaderless.training.forward_passes import BoundedPasses
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.optimizers.make_optimizer import make_optimizer
from leaderless.training.optimizers.optimizer import TrainedWeight, learning_rate_at


class Replicated(BoundedPasses):
    """See `Trainable`. A frozen model has no optimizer."""

    def __init__(self, model: Decoder, setup: EngineSetup) -> None:
        super().__init__(setup.process_group, setup.device, setup.micro_batch_tokens)
        self.module, self._setup = model.to(setup.device), setup
        self.policy_version = 0
        self.is_replica = False  # only the first rank writes tensors that all hold whole
        self.is_value_model = setup.is_critic
        self.vocab_size = model.vocab_size
        model.requires_grad_(setup.optimizer is not None)
        self._optimizer = make_optimizer(self.trained(), setup.optimizer) if setup.optimizer else None

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        config = self._setup.optimizer
        assert config is not None
        assert self._optimizer is not None
        for _, weight in self.weights():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = self.process_group.sum(grad, "gradients")
        grad_norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), config.max_grad_norm))
        learning_rate = learning_rate_at(config, self.policy_version, self._setup.num_updates)
        if allow is not None and not allow(grad_norm):
            self.discard_gradient()
            return UpdateInfo(grad_norm, learning_rate, is_made=False)
        if not math.isfinite(grad_norm):
            raise RuntimeError(f"the gradient norm of update {self.policy_version} is {grad_norm}")
        self._optimizer.step(learning_rate)
        self._optimizer.zero_grad()
        self.policy_version += 1
        return UpdateInfo(grad_norm, learning_rate)

    def discard_gradient(self) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.module.model.named_parameters()

    def trained(self) -> Iterator[TrainedWeight]:
        yield from (TrainedWeight(*one) for one in self.weights())

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights():
            yield name, weight.detach()

    def local_weights(self) -> Iterator[LocalWeight]:
        yield from (LocalWeight.of(name, weight) for name, weight in self.weights())

    def weight_shapes(self) -> Mapping[str, torch.Size]:
        return {name: weight.shape for name, weight in self.weights()}

    def write_description(self, folder: Path) -> None:
        self.module.write_description(folder)

    def state(self) -> dict[str, Tensor]:
        state = {f"weights.{name}": weight.detach() for name, weight in self.weights()}
        if self._optimizer is None:
            return state
        for name, weight in self.weights():
            for kind, kept in self._optimizer.states(weight).items():
                state[f"optimizer.{kind}.{name}"] = kept
        return state

    def state_loaded(self, policy_version: int) -> None:
        self.policy_version = policy_version
        if self._optimizer is not None:
            self._optimizer.resume(policy_version)

    def inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Attention, Tensor]:
        """Arguments of the model; at least one token is selected, as a model has to compute something."""
        select = micro_batch.select if len(micro_batch.select) else torch.zeros(1, dtype=torch.int64)
        attention = attention_over(micro_batch.families, self.device, torch.float32)
        return micro_batch.tokens.to(self.device), micro_batch.positions.to(self.device), attention, select


class ReplicatedPolicy(Replicated):
    """See `TrainEngine`."""

    @property
    def model(self) -> CausalLM:
        assert isinstance(self.module, CausalLM)
        return self.module

    def log_probs(self, batch: Batch) -> Jagged:
        return self.scores(batch, lambda micro_batch: self.forward(micro_batch, "none").log_probs)

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        count = len(micro_batch.targets)
        targets = micro_batch.targets if count else torch.zeros(1, dtype=torch.int64)
        outputs: TokenOutputs = self.module(*self.inputs(micro_batch), targets, micro_batch.temperature, entropy)
        return TokenOutputs(outputs.log_probs[:count], outputs.entropies[:count])


class ReplicatedCritic(Replicated):
    """See `ValueEngine`."""

    def values(self, batch: Batch) -> Jagged:
        return self.scores(batch, self.forward)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        assert isinstance(self.module, ValueModel)
        values: Tensor = self.module(*self.inputs(micro_batch))
        return values[: len(micro_batch.select)]


@train_backend(values=True)
def make_engine(setup: EngineSetup) -> ReplicatedPolicy | ReplicatedCritic:
    """Load a model on every rank."""
    if setup.is_critic:
        return ReplicatedCritic(load_value_model(setup.model, setup.role), setup)
    return ReplicatedPolicy(load_causal_lm(setup.model, setup.role), setup)
