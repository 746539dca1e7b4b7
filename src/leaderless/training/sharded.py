"""A model with its optimizer in fully sharded data parallelism (FSDP2); on one rank in float32, the plain module."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.errors import MemoryExhausted, is_out_of_memory
from leaderless.data.transport import ProcessGroup
from leaderless.device import release_memory, trim_host_memory
from leaderless.models.decoder import Decoder
from leaderless.training.engine import Result, UpdateInfo
from leaderless.training.micro_batches import MicroBatch, longest_sample, make_micro_batches, response_lengths
from leaderless.training.optimizer import learning_rate_at, make_optimizer

Model_co = TypeVar("Model_co", bound=Decoder, covariant=True)
CPU_PASS_TOKENS = 2048
"""Where a pass gathers nothing, a CPU is faster with passes whose activations stay near its caches."""


class ShardedModel(Generic[Model_co]):
    """See `Trainable`.

    Master weights, gradients and optimizer are float32 and sharded over the ranks of the layout; layers are gathered
    one by one as they compute, in the model's `compute_dtype`. Gradients are summed over ranks and never averaged: the
    denominators are in the loss.
    """

    def __init__(
        self,
        model: Model_co,
        config: ModelConfig,
        process_group: ProcessGroup,
        device: torch.device,
        micro_batch_tokens: int,
        *,
        optimizer: OptimizerConfig | None = None,
        num_updates: int = 0,
    ) -> None:
        """Shard a model, which is whole and the same on every rank; without an optimizer it is frozen.

        A pass has at most `micro_batch_tokens`; `num_updates` are those of the whole run, for the schedule.
        """
        self._process_group, self.device, self.micro_batch_tokens = process_group, device, micro_batch_tokens
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype)
        self._on_lowered: Callable[[int], None] | None = None
        # Activations are recomputed in training mode only. Without dropout the modes do not differ otherwise.
        self.model = model.train(optimizer is not None)
        self.policy_version = 0
        self._optimizer_config, self._num_updates = optimizer, num_updates
        for parameter in self.model.parameters():
            parameter.requires_grad_(optimizer is not None)
        self.units: list[FSDPModule] = []
        if process_group.size > 1 or config.compute_dtype != "float32":
            # Each unit moves to the device as it is sharded, so that no device ever holds the whole model.
            self._shard(self.compute_dtype)
        self.model.to(device)
        self._optimizer = make_optimizer(self.model.parameters(), optimizer) if optimizer else None

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that hold this instance."""
        return self._process_group

    def _shard(self, compute_dtype: torch.dtype) -> None:
        """Make each decoder layer, and the rest of the model, a unit that is gathered at once."""
        mesh = DeviceMesh.from_group(_handle(self._process_group), self.device.type)
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        layer_names = set(self.model.model._no_split_modules or ())  # noqa: SLF001
        for module in [m for m in self.model.modules() if type(m).__name__ in layer_names]:
            self.units.append(fully_shard(module, mesh=mesh, mp_policy=policy))
        for module in self.model.float32_modules():
            self.units.append(fully_shard(module, mesh=mesh, mp_policy=replace(policy, param_dtype=torch.float32)))
        self.units.append(fully_shard(self.model, mesh=mesh, mp_policy=policy))
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """See `Trainable`."""
        is_plain_on_cpu = self.device.type == "cpu" and not self.units
        return make_micro_batches(
            batch, self.micro_batch_tokens, self._process_group, CPU_PASS_TOKENS if is_plain_on_cpu else None
        )

    @torch.no_grad()
    def scores(self, batch: Batch, score: Callable[[MicroBatch], Tensor]) -> Jagged:
        """A number for each sampled token of a batch, from a function that computes those of a micro-batch."""
        lengths = response_lengths(batch.jagged("response_mask"))
        values = torch.empty(int(lengths.sum()), device=self.device)

        def fill(micro_batches: Iterable[MicroBatch]) -> None:
            for micro_batch in micro_batches:
                values[micro_batch.response_index.to(self.device)] = score(micro_batch)

        self.run_passes(batch, fill)
        if self.units:
            # FSDP keeps the root gathered after a forward pass, for a backward pass that does not come here.
            self.units[-1].reshard()
            self.trim_memory()
        return Jagged(values.cpu(), lengths, "response_tokens")

    def adapt_to_memory(self, on_lowered: Callable[[int], None]) -> None:
        """From now on lower the bound of a pass where memory runs out, and call a function with each new bound."""
        self._on_lowered = on_lowered

    def run_passes(self, batch: Batch, passes: Callable[[Iterable[MicroBatch]], Result]) -> Result:
        """See `Trainable`.

        Only a plain module on one rank can start again. Of several ranks, one that fails within a pass would leave the
        others in a collective, and a sharded module is left half gathered: there the lower bound has to wait for the
        next start of the run.
        """
        while True:
            under_way: list[MicroBatch] = []
            try:
                return passes(_watched(self.micro_batches(batch), under_way))
            except Exception as error:
                if not (under_way and is_out_of_memory(error)):
                    raise
                self._lower_bound(batch, under_way[0], error)
            # Only here is the error gone, which kept the tensors of the failed pass alive.
            gc.collect()
            release_memory(self.device)

    def _lower_bound(self, batch: Batch, micro_batch: MicroBatch, error: Exception) -> None:
        """Halve what was too much, but not below the longest sample; raise where the passes cannot start again."""
        num_tokens, longest = len(micro_batch.tokens), longest_sample(batch)
        before = min(self.micro_batch_tokens, num_tokens)
        after = max(before // 2, longest)
        if after >= before:
            remedy = (
                "a pass cannot take less than one sample; lower rollout.max_response_tokens or data.max_prompt_tokens, "
                "set models.<role>.gradient_checkpointing, or use more ranks"
            )
        elif self._on_lowered is None:
            remedy = (
                f"lower batch.micro_batch_tokens={self.micro_batch_tokens} (the longest sample has {longest}), or set "
                "it to auto"
            )
        else:
            self.micro_batch_tokens = after
            self._on_lowered(after)
            if self._process_group.size == 1 and not self.units:
                return
            remedy = (
                f"batch.micro_batch_tokens=auto is lowered to {after} for the next start; the same command continues "
                "with it"
            )
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryExhausted(
            f"rank {self._process_group.rank}: a micro-batch of {num_tokens:,} tokens in "
            f"{len(micro_batch.response_lengths):,} samples, the longest of "
            f"{max(family.longest for family in micro_batch.families):,}, does not fit into the memory of "
            f"{self.device} ({reason}): {remedy}"
        ) from error

    def discard_gradient(self) -> None:
        """See `Trainable`."""
        assert self._optimizer is not None
        self._optimizer.zero_grad()

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """See `Trainable`."""
        assert self._optimizer is not None
        assert self._optimizer_config is not None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optimizer_config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        learning_rate = learning_rate_at(self._optimizer_config, self.policy_version, self._num_updates)
        if allow is not None and not allow(grad_norm):
            self.discard_gradient()
            return UpdateInfo(grad_norm, learning_rate, is_made=False)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"rank {self._process_group.rank}: the gradient norm of update {self.policy_version} is {grad_norm}: "
                "lower the learning rate, or look at the rewards and advantages of this step"
            )
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.trim_memory()
        self.policy_version += 1
        return UpdateInfo(grad_norm, learning_rate)

    def trim_memory(self) -> None:
        """Return what gathered units have freed on the host, which would lie next to all that follows."""
        if self.units and self.device.type == "cpu":
            trim_host_memory()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainable`."""
        for name, parameter in self.named_weights():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight by its name in `transformers`, as this rank holds it."""
        yield from self.model.model.named_parameters()

    def state(self) -> dict[str, Tensor]:
        """See `Trainable`."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_weights():
            state[f"weights.{name}"] = parameter.detach()
            if self._optimizer is None:
                continue
            moments = self._optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), device=self.device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            state[f"optimizer.exp_avg.{name}"] = moments["exp_avg"]
            state[f"optimizer.exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    def state_loaded(self, policy_version: int) -> None:
        """See `Trainable`."""
        self.policy_version = policy_version
        if self._optimizer is not None:
            for moments in self._optimizer.state.values():
                moments["step"].fill_(float(policy_version))


def _watched(micro_batches: Sequence[MicroBatch], under_way: list[MicroBatch]) -> Iterator[MicroBatch]:
    """The micro-batches one by one; the one that is going through the model is in a list."""
    for micro_batch in micro_batches:
        under_way[:] = [micro_batch]
        yield micro_batch


def _handle(process_group: ProcessGroup) -> torch.distributed.ProcessGroup:
    handle = process_group.handle or torch.distributed.group.WORLD
    assert handle is not None
    return handle
