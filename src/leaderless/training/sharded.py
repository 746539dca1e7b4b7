"""A model with its optimizer in fully sharded data parallelism (FSDP2); on one rank in float32, the plain module.

    rank             0               1          along `dp`, for one unit, such as a layer
    weights      | rows 0 |      | rows 1 |     float32; what the optimizer keeps lies likewise
                      |   gather    |           when a pass comes to the unit, in `compute_dtype`
    pass        | rows 0, 1 |   | rows 0, 1 |   each rank with samples of its own
                      |    sum      |           in float32, and each rank keeps its rows
    gradients    | rows 0 |      | rows 1 |

Gradients are summed, and each rank updates the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import override

from leaderless.base.devices import trim_host_memory
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import (
    HeldWeights,
    LocalWeight,
    Placement,
    Pool,
    everything,
    part_of,
    shard_rows,
)
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import receive_weights
from leaderless.distributed.weights.tensor_parallel import tensor_rows
from leaderless.models.decoder import Shardable
from leaderless.models.gradient_checkpointing import offload_inputs
from leaderless.models.input_memory import input_memory
from leaderless.models.lora.expert_lora import LoraExperts, adapted_experts
from leaderless.models.lora.linear import adapted_layers, describe_adapters, is_adapter, merged
from leaderless.models.lora.nf4 import as_numbers, pack_layers, packed_weights
from leaderless.models.parallel.context import ContextParallel
from leaderless.models.routers import Routers
from leaderless.models.value_model import ValueModel
from leaderless.planner import Layout
from leaderless.planner.graph.adapters import EXPERT_WEIGHTS, lora_of
from leaderless.planner.layout import COPIES
from leaderless.planner.memory.layers import FIRST
from leaderless.training.engine import UpdateInfo
from leaderless.training.forward_passes import BoundedPasses
from leaderless.training.half_precision import ConvertedWeights, convert_inputs
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.optimizers.adamw import may_be_fused
from leaderless.training.optimizers.make_optimizer import make_optimizer
from leaderless.training.optimizers.muon import whole_matrices
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight, learning_rate_at
from leaderless.training.pipeline import StageQueue
from leaderless.training.routed_experts import RoutedPasses
from leaderless.training.sleeping_weights import SleepingWeights
from leaderless.training.weight_sharding import WeightSharding, forget_order

Model_co = TypeVar("Model_co", bound=Shardable, covariant=True)


class ShardedModel(BoundedPasses, Generic[Model_co]):
    """A model whose weights are sharded over the ranks of a layout, to be trained and scored.

    Master weights and gradients are float32, and sharded with the optimizer over the ranks of the layout; layers are
    gathered one by one as they compute, in the model's `compute_dtype`. Gradients are summed over ranks and never
    averaged: the denominators are in the loss.

    Attributes:
        seed: Seed of the run, for the dropout of adapters.
        dropout: Rate of this dropout, which is for passes with a gradient only.
        has_live_state: Always true: training changes the tensors of `state` in place.
        why_not_compiled: Reason for layers that cannot be compiled although they should; empty otherwise.
    """

    has_live_state = True

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
        division: WeightSharding = WeightSharding(),  # noqa: B008 - it cannot be changed
    ) -> None:
        """Shard a model, which is whole or without values on every rank; without an optimizer it is frozen.

        A pass has at most `micro_batch_tokens`; `num_updates` counts the whole run's, for the schedule. A model
        that one rank holds is not divided: where it computes in half precision, either its layers are converted one by
        one, as ranks gather them, or, if it is kept whole, all of it is converted once for many passes.
        """
        super().__init__(process_group, device, micro_batch_tokens)
        self.peers: ContextParallel | None = None
        lora = lora_of(config, "models")
        self._config = config.model_copy(update={"lora": lora})
        self.why_not_compiled = ""
        self.seed, self.dropout = 0, 0.0 if lora is None else lora.dropout
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype)
        self.model = model
        pack_layers(model)
        model.eval()
        self.policy_version = 0
        self._optimizer_config, self._num_updates = optimizer, num_updates
        # Parameters that are none of `trained_weights`, such as those below adapters, stay frozen.
        model.requires_grad_(False)
        for name, parameter in model.trained_weights():
            parameter.requires_grad_(optimizer is not None and not model.is_frozen(name))
        self.units: list[FSDPModule] = []
        mesh, self._keeps, self._offload_folder, offload_frozen = division
        self.is_replica, self._num_shards = False, 1
        self._tensor, self._experts, self._mesh = model.tensor_parallel, model.expert_parallel, mesh
        tensor = self._tensor
        num_holders = process_group.size if tensor is None else process_group.size // tensor.peers.size
        self.line: StageQueue | None = None
        if (pipeline := model.pipeline) is not None:
            self.line = StageQueue(pipeline, device, self.compute_dtype)
        has_copies = self._experts is not None and bool(self._experts.gathered)
        is_divided, converts = num_holders > 1 or has_copies or pipeline is not None, config.compute_dtype != "float32"
        self._converted: ConvertedWeights | None = None
        self.is_plain = not (is_divided or converts)
        if converts and not is_divided and self._keeps != "nothing":
            self._converted = self._convert()
        elif not self.is_plain:
            # Each unit moves to the device as it is sharded, so that no device ever holds the whole model.
            if mesh is None:
                mesh = DeviceMesh.from_group(process_group.torch_group, device.type, mesh_dim_names=("dp",))
            self._shard(mesh["dp"], device)
            self._num_shards = mesh["dp"].size()
            others = [axis for axis in mesh.mesh_dim_names or () if axis != "dp"]
            self.is_replica = tensor is None and any(mesh.get_local_rank(axis) for axis in others)
        self.can_start_again = process_group.size == 1 and not self.units
        model.complete(self._whole, device)
        model.to(device)
        num_alike = 1 if tensor is None else tensor.peers.size
        routers = model.routers or Routers.of(self.model)
        self.routed = None if routers is None else RoutedPasses(routers, process_group, device, num_alike)
        # Only now: `fully_shard` and `complete` put other parameters in place of those that the model had.
        self._optimizer = self._make_optimizer(optimizer) if optimizer else None
        if optimizer and config.offload_activations:
            offload_inputs(model, input_memory(device, self._offload_folder))
        self._sleeping: SleepingWeights | None = None
        if optimizer is None and offload_frozen != "none":
            self._sleeping = SleepingWeights(model, device, offload_frozen, self._offload_folder)

    def _make_optimizer(self, config: OptimizerConfig) -> Optimizer:
        """Make an optimizer of the weights that this rank holds a part of."""
        shapes, words = self.weight_shapes(), self.model.shared_words
        # Both stages that have the words change them alike, and so under one name.
        first = next((name for name in shapes if FIRST in name.split(".")), "")
        named = ((first if one is words else name, one) for name, one in self.model.trained_weights())
        trained = [TrainedWeight(*one, self._whole) for one in named]
        is_fused, dtype = may_be_fused(self.device, self._process_group), self.compute_dtype
        matrices = whole_matrices(shapes, self._pool(), self._process_group)
        return make_optimizer(
            trained, config, is_fused=is_fused, matrices=matrices, dtype=dtype, folder=self._offload_folder
        )

    def divide_passes(self, peers: ContextParallel) -> None:
        """Let peers divide the tokens of each pass, so that together they take as many times more."""
        self.peers, self.num_parts = peers, peers.size

    @override
    def begin_pass(self, *, is_last: bool) -> None:
        """Add up whole gradients on each rank until the last pass, in float32."""
        # Ranks add up their gradients once an update, and not after each micro-batch.
        if self.units and self._keeps == "all":
            self.units[-1].set_requires_gradient_sync(is_last)

    @property
    def is_value_model(self) -> bool:
        """Whether the model has a scalar head and no logits."""
        return isinstance(self.model, ValueModel)

    @property
    def vocab_size(self) -> int:
        """Number of tokens with an embedding."""
        return self.model.vocab_size

    def _shard(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Make each decoder layer, and the rest of the model, a unit that is gathered at once.

        Divided experts belong to no layer's unit. If several ranks have the same ones, they are units of their own.
        """
        # In float32 also where layers compute in half precision: sums over ranks would lose digits.
        policy = MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)
        # Weights of choices, temperatures and what a body has done are not rounded on their way in.
        exact = replace(policy, cast_forward_inputs=False)
        kept = set[nn.Parameter]() if self._experts is None else self._experts.kept
        # FSDP leaves these alone, and does not move them either.
        for weight in kept:
            weight.data = weight.data if weight.is_meta else weight.data.to(device)
        # Inner units first: a unit takes all parameters within it that no other unit has taken.
        if (experts := self._experts) is not None and experts.gathered:
            copies, present = experts.mesh[COPIES], {*self.model.modules()}  # without those of other stages
            for module in [m for m in experts.gathered if m in present]:
                self._add_unit(module, copies, exact, shard_placement_fn=experts.placement)
        for module in self._layers():
            self._add_unit(module, mesh, policy, ignored_params=kept)
        for module in self.model.float32_modules():
            self._add_unit(module, mesh, replace(policy, param_dtype=torch.float32))
        # The root takes what is left.
        self._add_unit(self.model, mesh, exact, ignored_params=kept)
        if self._keeps != "nothing":
            self.units[-1].set_reshard_after_forward(False)  # the root's, and that of all units within

    def _add_unit(self, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, **options: object) -> None:
        """Shard a module over a mesh, whose gradients are summed and not averaged."""
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, **options)  # type: ignore[call-overload]
        # Averages would depend on the number of ranks; the denominators are in the loss.
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:  # else torch would divide by 1 and copy the quotient
            unit.set_gradient_divide_factor(1.0)
        self.units.append(unit)

    def _convert(self) -> ConvertedWeights:
        """Have the model compute with converted weights, which this rank alone has."""
        for module in self._layers():
            convert_inputs(module, self.compute_dtype)
        kept = set[nn.Parameter]() if self._experts is None else self._experts.kept
        return ConvertedWeights(self.model, self.compute_dtype, self.model.float32_modules(), kept)

    def _layers(self) -> list[nn.Module]:
        """The decoder layers, and the layers of the vision tower, but nothing within them, as the mixers of Mamba."""
        names = set(getattr(self.model.model, "_no_split_modules", None) or ())
        layers: list[nn.Module] = []
        within = set[nn.Module]()
        for module in self.model.modules():  # those within a module come after it
            if type(module).__name__ in names and module not in within:
                layers.append(module)
                within.update(module.modules())
        return layers

    @override
    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Cut a batch, and prepare the pipeline for the micro-batches, if there is one."""
        cut = super().micro_batches(batch)
        if self.line is not None:
            self.line.expect(cut)
        return cut

    @override
    def end_passes(self, *, is_done: bool) -> None:
        self._release_converted()
        if self.line is not None and is_done:
            self.line.finish()

    def scores(self, batch: Batch, score: Callable[[MicroBatch], Tensor], shape: Sequence[int] = ()) -> Jagged:
        """A number for each sampled token of a batch, from a function that computes them for a micro-batch."""
        with self._weights_here():
            return super().scores(batch, score, shape)

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        """Have the weights here for forward passes that no backward pass follows."""
        with nullcontext() if self._sleeping is None else self._sleeping.awake():
            yield
            if self.units:
                # FSDP keeps the root, or all units, gathered after a forward pass, for a backward pass that does not
                # come.
                for unit in self.units[-1:] if self._keeps == "nothing" else self.units:
                    unit.reshard()
                forget_order(self.units)
                self._trim_memory()

    def discard_gradient(self) -> None:
        """Discard the gradient, and the memory that it has taken."""
        assert self._optimizer is not None
        has_gradient = any(parameter.grad is not None for parameter in self.model.parameters())
        self._optimizer.zero_grad()
        self._release_converted()
        if self.routed is not None:
            self.routed.discard()
        if has_gradient:
            self._trim_memory()

    def change_optimizer(self, config: OptimizerConfig) -> None:
        """Use other settings of the same type of optimizer from the next update on."""
        assert self._optimizer is not None
        self._optimizer_config = self._optimizer.config = config

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """Clip the gradient over all shards, step the optimizer and clear the gradient."""
        assert self._optimizer is not None
        assert self._optimizer_config is not None
        grad_norm = self._clip(self._optimizer_config.max_grad_norm)
        learning_rate = learning_rate_at(self._optimizer_config, self.policy_version, self._num_updates)
        if self.routed is not None:
            self.routed.stop_pulling()
        if not self.is_allowed(grad_norm, self.policy_version, allow):
            self.discard_gradient()
            return UpdateInfo(grad_norm, learning_rate, is_made=False)
        self._optimizer.step(learning_rate)
        # Gradients take as much memory as the weights, which others need until the next update.
        self.discard_gradient()
        self.policy_version += 1
        return UpdateInfo(grad_norm, learning_rate)

    @property
    def _line(self) -> StageQueue:
        """The line of stages, where there is one."""
        assert self.line is not None
        return self.line

    def expert_loads(self) -> Tensor | None:
        """Loads of the experts, if the model has any that are known."""
        return None if self.routed is None else self.routed.loads()

    def _clip(self, max_norm: float) -> float:
        """Scale the gradient down to a norm if it is longer; returns its norm before."""
        if self._tensor is None and self._experts is None and self.line is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            whole = self._norm_of_parts()
        # Also of the words of the last stage, which have no name of their own.
        gradients = [_local(weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, (max_norm / (whole + 1e-6)).clamp(max=1.0))
        return float(whole)

    def _norm_of_parts(self) -> Tensor:
        """The norm of a gradient of which ranks have parts that are not along `dp` alone."""
        gradients = [(name, _local(p.grad)) for name, p in self.named_weights() if p.grad is not None]
        words = self.model.shared_words
        if words is not None and words.grad is not None:
            shared = _local(words.grad)
            shared += self._line.exchange(shared)  # the sum is the same on both stages, bit for bit
        if self._tensor is not None:
            self._tensor.sum_gradients(gradients)

        def counts(name: str) -> bool:
            """Whether this rank counts the gradient of a weight; of ranks with the same one, only one does."""
            is_expert = self._experts is not None and name in self._experts.shapes
            return self._tensor is None or is_expert or self._tensor.counts(name)

        own = torch.zeros((), device=self.device)
        for is_counted in (True, False):
            squares = [gradient.square().sum() for name, gradient in gradients if counts(name) == is_counted]
            if squares:  # another rank counts the same gradient, but it may be NaN on this one alone
                own = own + is_counted * torch.stack(squares).sum()
        return self._process_group.sum(own, "the norm of the gradient").sqrt()

    def _release_converted(self) -> None:
        """Release converted weights, after which the weights may change."""
        if self._converted is not None and self._converted.are_there:
            self._converted.release()
            self._trim_memory()

    def _trim_memory(self) -> None:
        """Return host memory that gathered units or gradients have freed, before anything else is allocated."""
        if self.device.type == "cpu":
            trim_host_memory()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight, whole, gathered from all shards one at a time."""
        held, holders = HeldWeights.of(self.local_weights(), self.policy_version), self._pool()
        pools = holders, Pool(holders.layout, everything)
        route = WeightRoute(
            "whole weights", held.shapes, *pools, torch.float32, self._process_group.rank, is_gathered=True
        )
        yield from receive_weights(route, self._process_group, self._process_group, held)

    def _pool(self) -> Pool:
        """The ranks, and the part of each weight that each of them has."""
        ranks = self._process_group.ranks
        layout = Layout(ranks, self._num_shards, tp=len(ranks) // self._num_shards)
        placement: Placement = shard_rows if self._tensor is None else tensor_rows
        if self._experts is not None:
            layout, placement = replace(layout, ep=self._experts.peers.size), tensor_rows
        if self.line is not None:
            layout, placement = self.line.stages.layout, self.line.stages.placement()
        return Pool(layout, placement)

    def local_weights(self) -> Iterator[LocalWeight]:
        """This rank's shards; of other stages' weights, empty ones."""
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
        """This rank's part of every weight, with its adapter merged into it."""
        layers = {id(layer.weight): layer for _, layer in adapted_layers(self.model)}
        modules = [module for _, module in adapted_experts(self.model)]
        experts = {id(module.weight(name)): (module, name) for module in modules for name in EXPERT_WEIGHTS}
        here = {name: one for name, one in self.model.model.named_parameters() if not is_adapter(name)}
        blocks, elsewhere = packed_weights(self.model.model), {} if self.line is None else self.line.stages.base_shapes
        for name in elsewhere or here:
            if (weight := here.get(name)) is None:
                yield LocalWeight.nothing(name, tuple(elsewhere[name]), self.device)
                continue
            numbers = as_numbers(weight, blocks[name], has_values=True) if name in blocks else weight
            own = LocalWeight.of(name, self._whole(name, numbers))
            if (layer := layers.get(id(weight))) is not None:
                matrix_a, rows_b = _gathered(layer.lora_A), LocalWeight.of("", layer.lora_B).local
                own = replace(own, local=merged(layer, own.local, matrix_a, rows_b))
            if (adapted := experts.get(id(weight))) is not None:
                own = replace(own, local=self._merged_experts(own, *adapted))
            yield own

    def _merged_experts(self, own: LocalWeight, module: LoraExperts, name: str) -> Tensor:
        """This rank's part of a weight of experts, with their adapters; it may have only some of the experts."""
        a, b = map(_gathered, module.matrices(name))
        first = 0 if self._experts is None else len(a) * self._experts.peers.ranks.index(self._experts.peers.rank)
        return module.merged(own.local, (own.block.offsets[0] - first, own.block.offsets[1]), (a, b))

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight that training changes by its name in `transformers`, as this rank holds it.

        If the head is the embedding, both belong to the first stage.
        """
        again = None if self.line is None or self.line.stages.is_first else self.model.shared_words
        yield from ((name, weight) for name, weight in self.model.trained_weights() if weight is not again)

    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every trained weight, of all stages."""
        if self.line is not None:
            return self.line.stages.shapes
        return {name: self._whole(name, parameter).shape for name, parameter in self.named_weights()}

    def _whole(self, name: str, value: Tensor) -> Tensor:
        """A weight, or what the optimizer keeps of it, as a part of the whole; see `Optimizer.states`."""
        if self._experts is not None and name in self._experts.shapes:
            return self._experts.whole(name, _local(value.detach()))
        if self._tensor is None:
            return value
        assert self._mesh is not None
        dim, shape = self._tensor.dim_of(name), self._tensor.shapes[name]
        parts = self._tensor.peers.size if dim == len(shape) - 1 else 1
        shape = torch.Size((*shape[:-1], value.shape[-1] * parts))
        along = [Replicate() if dim is None else Shard(dim), Shard(0)]
        return part_of(_local(value.detach()), self._mesh, along, shape)

    def write_description(self, folder: Path) -> None:
        """Write `config.json` and its like, and the description of adapters if there are any."""
        self.model.write_description(folder)
        if self._config.lora is not None:
            describe_adapters(folder, self.weight_shapes(), self._config)

    def state(self) -> dict[str, Tensor]:
        """Sharded weights and what the optimizer keeps, the very tensors that training changes."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_weights():
            state[f"weights.{name}"] = self._whole(name, parameter.detach())
            if self._optimizer is None or not parameter.requires_grad:
                continue
            for kind, kept in self._optimizer.states(parameter).items():
                state[f"optimizer.{kind}.{name}"] = self._whole(name, kept)
        return state

    def state_loaded(self, policy_version: int) -> None:
        """Take over written tensors and their version. All ranks call it together, as some stages share the words."""
        self.policy_version = policy_version
        # Copies in half precision are those of other weights now.
        self._release_converted()
        # Both stages have the words, but a checkpoint has them once: the last stage takes those of the first.
        if (words := self.model.shared_words) is not None:
            tensors = [words.detach()]
            if self._optimizer is not None and words.requires_grad:
                tensors += self._optimizer.states(words).values()
            for own in map(_local, tensors):
                found = self._line.exchange(own.to(self.device))  # from the host, if states are there
                if not self._line.stages.is_first:
                    own.copy_(found)
        # The number of steps is in no checkpoint of the optimizer: it is the policy version.
        if self._optimizer is not None:
            self._optimizer.resume(policy_version)


def _local(value: Tensor) -> Tensor:
    """The memory of what this rank has of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _gathered(parameter: nn.Parameter) -> Tensor:
    """All of a parameter, gathered from the ranks that hold it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
