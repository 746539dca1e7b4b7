"""An optimizer of a model's weights, as one rank holds them, and its learning rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leaderless.config.models import OptimizerConfig
from leaderless.distributed.weights.blocks import LocalWeight, Shape, WeightBlock, part_of
from leaderless.training.optimizers.state_memory import Kept, StateMemory, StatesOnDevice, StateSpec


def _as_it_is(name: str, value: Tensor) -> Tensor:  # noqa: ARG001
    return value


@dataclass(frozen=True, eq=False)
class TrainedWeight:
    """A weight that training changes.

    Attributes:
        name: Name of the whole weight.
        parameter: Its part on this rank; whole, or a `DTensor`.
        place: Function of a name and a tensor that lies like the parameter; it returns the tensor as a part of the
            whole. By default, the parameter is all of the weight.
    """

    name: str
    parameter: nn.Parameter
    place: Callable[[str, Tensor], Tensor] = _as_it_is

    @cached_property
    def placed(self) -> LocalWeight:
        """This rank's part of the weight, in the memory that it had at first."""
        return LocalWeight.of(self.name, self.place(self.name, self.parameter.detach()))

    @property
    def shape(self) -> Shape:
        """Shape of the whole weight."""
        return self.placed.shape

    @property
    def block(self) -> WeightBlock:
        """This rank's part of the whole."""
        return self.placed.block

    @property
    def local(self) -> Tensor:
        """The memory of this rank's part."""
        return local_part(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The memory of the gradient of this rank's part, if there is one."""
        return None if self.parameter.grad is None else local_part(self.parameter.grad)

    def like(self, local: Tensor) -> Tensor:
        """A tensor that lies like the parameter, with a last dimension of its own, from this rank's part of it.

        The part may be in host memory, whatever the device of the parameter is.
        """
        parameter = self.parameter
        local = local if parameter.ndim else local.view(())
        if not isinstance(parameter, DTensor):
            return local
        own, shape = parameter.to_local(), parameter.shape
        if own.ndim and own.shape[-1] != local.shape[-1]:
            shape = torch.Size((*shape[:-1], shape[-1] * local.shape[-1] // own.shape[-1]))
        return part_of(local, parameter.device_mesh, parameter.placements, shape)

    def decay(self, config: OptimizerConfig) -> float:
        """Weight decay, which is for matrices."""
        return config.weight_decay if self.parameter.ndim >= 2 else 0.0


def local_part(value: Tensor) -> Tensor:
    """The memory of this rank's part of a tensor; a single number is a row."""
    value = value.to_local() if isinstance(value, DTensor) else value
    return value if value.ndim else value.view(1)


Specs = Callable[[TrainedWeight], Mapping[str, StateSpec]]
"""Shapes and types of what is kept of a weight, by kind."""


class Optimizer(ABC):
    """An optimizer. All ranks of a model make one and call its methods together.

    Attributes:
        num_updates: Steps so far.
    """

    def __init__(
        self, weights: Iterable[TrainedWeight], config: OptimizerConfig, memory: StateMemory | None = None
    ) -> None:
        """Take weights, and memory for what is kept, by default on their device; frozen weights are left out."""
        self.weights: Sequence[TrainedWeight] = [one for one in weights if one.parameter.requires_grad]
        self.config, self.num_updates = config, 0
        self._weight_of = {one.parameter: one for one in self.weights}
        device = self.weights[0].local.device if self.weights else torch.device("cpu")
        self._memory = memory or StatesOnDevice(device)
        self._kept = dict[nn.Parameter, Kept]()
        self._keeps = set[nn.Parameter]()  # of which something is kept here
        self._to_keep: list[tuple[Sequence[TrainedWeight], Specs]] = []

    def _keep(self, weights: Sequence[TrainedWeight], specs: Specs) -> None:
        """Keep zeros of some kinds of each of some weights, in its rank's part.

        On the device they are made when they are first asked for, after all models are loaded. Elsewhere, whether there
        is room for them is known at once.
        """
        self._keeps |= {one.parameter for one in weights}
        self._to_keep.append((weights, specs))
        if not isinstance(self._memory, StatesOnDevice):
            self._make_kept()

    def _make_kept(self) -> None:
        for weights, specs in self._to_keep:
            kinds = [specs(one) for one in weights]
            zeros = iter(self._memory.zeros([spec for one in kinds for spec in one.values()]))
            for weight, one in zip(weights, kinds, strict=True):
                self._kept[weight.parameter] = {kind: next(zeros) for kind in one}
        self._to_keep.clear()

    def _groups(self, weights: Sequence[TrainedWeight]) -> Iterator[Sequence[tuple[TrainedWeight, Kept]]]:
        """Weights with a gradient, and what is kept of them, where it can be changed: some after the other."""
        self._make_kept()
        some = [one for one in weights if one.gradient is not None]
        for places, kept in self._memory.groups([self._kept[one.parameter] for one in some]):
            yield [*zip((some[place] for place in places), kept, strict=True)]

    def step(self, learning_rate: float) -> None:
        """Change the weights by their gradients, whose memory may be written to; weights without one stay."""
        self._step(learning_rate)
        self.num_updates += 1

    @abstractmethod
    def _step(self, learning_rate: float) -> None:
        """Change the weights; `num_updates` counts the steps before this one."""

    def states(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Numbers that are kept of a parameter, by kind, in the memory that steps change; zeros before the first one.

        Each lies like the parameter: its last dimension may be shorter, all others are the same. It may be in host
        memory, or in that of a file, while the parameter is on a device.
        """
        self._make_kept()
        weight = self._weight_of[parameter]
        return {kind: weight.like(kept) for kind, kept in self._kept[parameter].items()}

    def resume(self, num_updates: int) -> None:
        """Continue behind some steps, with states that have been written to."""
        self.num_updates = num_updates

    def zero_grad(self) -> None:
        """Release all gradients."""
        for weight in self.weights:
            weight.parameter.grad = None


def learning_rate_at(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """The learning rate of an optimizer update, counted from 0; a schedule ends at the last of the run's updates."""
    if update < config.warmup_updates:
        return config.peak * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.peak
    last = max(num_updates - 1, config.warmup_updates + 1)
    progress = min(1.0, (update - config.warmup_updates) / (last - config.warmup_updates))
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.peak * (config.final_fraction + (1 - config.final_fraction) * share)
