"""A model with its optimizer in fully sharded data parallelism (FSDP2); on one rank in float32, the plain module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.transport import ProcessGroup
from leaderless.device import trim_host_memory
from leaderless.models.context_parallel import ContextParallel
from leaderless.models.decoder import Decoder, ValueModel
from leaderless.models.experts import divide_experts
from leaderless.models.lora import adapted_layers, describe_adapters, is_adapter, merged
from leaderless.planner import Layout
from leaderless.planner.adapters import lora_of
from leaderless.training.engine import Result, UpdateInfo
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.optimizer import learning_rate_at, make_optimizer
from leaderless.training.passes import BoundedPasses
from leaderless.training.pipeline import Line
from leaderless.training.routed import RoutedPasses
from leaderless.weights.blocks import HeldWeights, LocalWeight, Placement, Pool, everything, shard_rows
from leaderless.weights.route import Route
from leaderless.weights.stream import receive_weights
from leaderless.weights.tensor_parallel import tensor_rows

Model_co = TypeVar("Model_co", bound=Decoder, covariant=True)


class ShardedModel(BoundedPasses, Generic[Model_co]):
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
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Shard a model, which is whole or without values on every rank; without an optimizer it is frozen.

        A pass has at most `micro_batch_tokens`; `num_updates` are those of the whole run, for the schedule. Weights are
        divided along the axis `dp` of the mesh, which has this axis alone by default, and are the same along others,
        except that those of a divided model have parts along `tp`. Experts may stay divided while they compute.
        """
        super().__init__(process_group, device, micro_batch_tokens)
        self.peers: ContextParallel | None = None
        self._config = config.model_copy(update={"lora": lora_of(config, "models")})
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype)
        # Activations are recomputed in training mode only; the modes do not differ otherwise.
        self.model = model.train(optimizer is not None)
        self.policy_version = 0
        self._optimizer_config, self._num_updates = optimizer, num_updates
        self.model.requires_grad_(False)
        for name, parameter in self.named_weights():
            parameter.requires_grad_(optimizer is not None and not model.is_frozen(name))
        self.units: list[FSDPModule] = []
        self._divided: set[nn.Parameter] = set()  # weights of experts that are not gathered
        self.is_replica, self._num_shards = False, 1
        self._tensor, self._mesh = model.tensor_parallel, mesh
        tensor = self._tensor
        num_holders = process_group.size if tensor is None else process_group.size // tensor.peers.size
        self.line: Line | None = None
        if (pipeline := model.pipeline) is not None:
            self.line = Line(pipeline, device, self.compute_dtype)
        if num_holders > 1 or pipeline is not None or config.compute_dtype != "float32":
            # Each unit moves to the device as it is sharded, so that no device ever holds the whole model.
            if mesh is None:
                mesh = DeviceMesh.from_group(process_group.torch_group, device.type, mesh_dim_names=("dp",))
            if model.divides_experts:
                self._divided = divide_experts(self.model, process_group, mesh["dp"], device)
            self._shard(mesh["dp"])
            self._num_shards = mesh["dp"].size()
            others = [axis for axis in mesh.mesh_dim_names or () if axis != "dp"]
            self.is_replica = tensor is None and any(mesh.get_local_rank(axis) for axis in others)
            self.is_plain = False
        model.complete(self._whole, device)
        self.model.to(device)
        self.routed = RoutedPasses(self.model if pipeline is None else None, process_group, device)
        self._optimizer = make_optimizer(self.model.parameters(), optimizer) if optimizer else None

    def divide_passes(self, peers: ContextParallel) -> None:
        """Let peers divide the tokens of each pass, so that together they take as many times more."""
        self.peers, self.num_parts = peers, peers.size

    @property
    def is_value_model(self) -> bool:
        """See `Trainable`."""
        return isinstance(self.model, ValueModel)

    @property
    def vocab_size(self) -> int:
        """See `Trainable`."""
        return self.model.vocab_size

    def _shard(self, mesh: DeviceMesh) -> None:
        """Make each decoder layer, and the rest of the model, a unit that is gathered at once."""
        policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        layer_names = set(getattr(self.model.model, "_no_split_modules", None) or ())
        for module in [m for m in self.model.modules() if type(m).__name__ in layer_names]:
            self.units.append(fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=self._divided))
        for module in self.model.float32_modules():
            self.units.append(fully_shard(module, mesh=mesh, mp_policy=replace(policy, param_dtype=torch.float32)))
        self.units.append(fully_shard(self.model, mesh=mesh, mp_policy=policy, ignored_params=self._divided))
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """See `Trainable`."""
        cut = super().micro_batches(batch)
        if self.line is not None:
            self.line.expect(cut)
        return cut

    def run_passes(self, batch: Batch, passes: Callable[[Iterable[MicroBatch]], Result]) -> Result:
        """See `Trainable`."""
        result = super().run_passes(batch, passes)
        if self.line is not None:
            self.line.finish()
        return result

    def scores(self, batch: Batch, score: Callable[[MicroBatch], Tensor]) -> Jagged:
        """A number for each sampled token of a batch, from a function that computes those of a micro-batch."""
        scores = super().scores(batch, score)
        if self.units:
            # FSDP keeps the root gathered after a forward pass, for a backward pass that does not come here.
            self.units[-1].reshard()
            self._trim_memory()
        return scores

    def discard_gradient(self) -> None:
        """See `Trainable`."""
        assert self._optimizer is not None
        has_gradient = any(parameter.grad is not None for parameter in self.model.parameters())
        self._optimizer.zero_grad()
        self.routed.discard()
        if has_gradient:
            self._trim_memory()

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """See `Trainable`."""
        assert self._optimizer is not None
        assert self._optimizer_config is not None
        grad_norm = self._clip(self._optimizer_config.max_grad_norm)
        learning_rate = learning_rate_at(self._optimizer_config, self.policy_version, self._num_updates)
        self.routed.stop_pulling()
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
        self.discard_gradient()
        self.policy_version += 1
        return UpdateInfo(grad_norm, learning_rate)

    def expert_loads(self) -> Tensor | None:
        """See `RoutedEngine`."""
        return self.routed.loads()

    def _clip(self, max_norm: float) -> float:
        """Scale the gradient down to a norm if it is longer; returns its norm before."""
        if self._tensor is None and self.line is None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        gradients = [(name, _local(p.grad)) for name, p in self.named_weights() if p.grad is not None]
        counted: Iterable[Tensor] = (gradient for _, gradient in gradients)
        if self._tensor is not None:
            self._tensor.sum_gradients(gradients)
            counted = self._tensor.counted(gradients)
        squares = [one.square().sum() for one in counted]
        whole = self._process_group.sum(torch.stack(squares).sum(), "the norm of the gradient").sqrt()
        for _, gradient in gradients:
            gradient.mul_((max_norm / (whole + 1e-6)).clamp(max=1.0))
        return float(whole)

    def _trim_memory(self) -> None:
        """Return what gathered units or gradients have freed on the host, which would lie next to all that follows."""
        if self.device.type == "cpu":
            trim_host_memory()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainable`."""
        held = HeldWeights.of(self.local_weights(), self.policy_version)
        ranks = self._process_group.ranks
        layout = Layout(ranks, self._num_shards, tp=len(ranks) // self._num_shards)
        placement: Placement = shard_rows if self._tensor is None else tensor_rows
        if self.line is not None:
            layout, placement = self.line.stages.layout, self.line.stages.placement()
        pools = Pool(layout, placement), Pool(layout, everything)
        route = Route("trained", held.shapes, *pools, torch.float32, self._process_group.rank, is_gathered=True)
        yield from receive_weights(route, self._process_group, self._process_group, held)

    def local_weights(self) -> Iterator[LocalWeight]:
        """See `Trainable`."""
        if self.line is None:
            for name, parameter in self.named_weights():
                yield LocalWeight.of(name, self._whole(name, parameter))
            return
        here = dict(self.named_weights())
        for name, shape in self.line.stages.shapes.items():
            if name in here:
                yield LocalWeight.of(name, self._whole(name, here[name]))
            else:
                yield LocalWeight.nothing(name, tuple(shape), self.device)

    def merged_weights(self) -> Iterator[LocalWeight]:
        """See `AdaptedEngine`."""
        layers = {id(layer.weight): layer for _, layer in adapted_layers(self.model)}
        for name, weight in self.model.model.named_parameters():
            if is_adapter(name):
                continue
            own = LocalWeight.of(name, self._whole(name, weight))
            if (layer := layers.get(id(weight))) is not None:
                matrix_a, rows_b = _gathered(layer.lora_A), LocalWeight.of("", layer.lora_B).local
                own = replace(own, local=merged(layer, own.local, matrix_a, rows_b))
            yield own

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight that training changes by its name in `transformers`, as this rank holds it."""
        yield from self.model.trained_weights()

    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """See `Trainable`."""
        if self.line is not None:
            return self.line.stages.shapes
        return {name: self._whole(name, parameter).shape for name, parameter in self.named_weights()}

    def _whole(self, name: str, value: Tensor) -> Tensor:
        """A weight, or what the optimizer keeps of it, as a part of the whole."""
        if self._tensor is None:
            return value
        assert self._mesh is not None
        dim, shape = self._tensor.dim_of(name), self._tensor.shapes[name]
        along = [Replicate() if dim is None else Shard(dim), Shard(0)]
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            _local(value.detach()), self._mesh, along, run_check=False, shape=shape, stride=strides
        )

    def write_description(self, folder: Path) -> None:
        """See `Trainable`."""
        self.model.write_description(folder)
        if self._config.lora is not None:
            describe_adapters(folder, self.weight_shapes(), self._config)

    def state(self) -> dict[str, Tensor]:
        """See `Trainable`."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_weights():
            state[f"weights.{name}"] = self._whole(name, parameter.detach())
            if self._optimizer is None or not parameter.requires_grad:
                continue
            moments = self._optimizer.state[parameter]
            if not moments:
                moments["step"] = torch.zeros((), device=self.device)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
            state[f"optimizer.exp_avg.{name}"] = self._whole(name, moments["exp_avg"])
            state[f"optimizer.exp_avg_sq.{name}"] = self._whole(name, moments["exp_avg_sq"])
        return state

    def state_loaded(self, policy_version: int) -> None:
        """See `Trainable`."""
        self.policy_version = policy_version
        if self._optimizer is not None:
            for moments in self._optimizer.state.values():
                moments["step"].fill_(float(policy_version))


def _local(value: Tensor) -> Tensor:
    """The memory of what this rank has of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _gathered(parameter: nn.Parameter) -> Tensor:
    """All of a parameter, gathered from the ranks that hold it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
