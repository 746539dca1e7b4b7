"""AdamW, with moments in float32 or in bfloat16."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from math import sqrt

import torch
from torch import nn
from torch.optim.adamw import adamw

from leaderless.config.models import OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight
from leaderless.training.optimizers.rounding import BITS, pieces, random_words, rounded
from leaderless.training.optimizers.state_memory import Kept, StateMemory, StateSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(
    weights: Iterable[TrainedWeight], config: OptimizerConfig, *, is_fused: bool, memory: StateMemory | None = None
) -> Optimizer:
    """AdamW with moments in the type that the settings name."""
    if config.state_dtype == "bfloat16":
        return RoundedAdamW(weights, config, memory)
    return AdamW(weights, config, is_fused=is_fused, memory=memory)


def moments_of(dtype: torch.dtype | None = None) -> Callable[[TrainedWeight], dict[str, StateSpec]]:
    """Both moments of a weight, in a type, by default its own."""
    return lambda one: {kind: StateSpec(tuple(one.local.shape), dtype or one.local.dtype) for kind in MOMENTS}


class AdamW(Optimizer):
    """AdamW with weight decay on matrices only, in one kernel or in many.

    Source: Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2. The decay is multiplied by the learning rate, as in
    PyTorch, and not by its schedule alone.
    """

    def __init__(
        self,
        weights: Iterable[TrainedWeight],
        config: OptimizerConfig,
        *,
        is_fused: bool,
        memory: StateMemory | None = None,
    ) -> None:
        """Take weights, and memory for moments; `is_fused` asks for one kernel."""
        super().__init__(weights, config, memory)
        self._is_fused = is_fused
        self._keep(self.weights, moments_of())
        # Only a fused step counts on the device: others would wait for each number.
        self._numbers = {
            one.parameter: torch.zeros((), device=one.local.device if is_fused else "cpu") for one in self.weights
        }

    def _step(self, learning_rate: float) -> None:
        for group in self._groups(self.weights):
            by_decay: dict[float, list[tuple[TrainedWeight, Kept]]] = {}
            for weight, kept in group:
                by_decay.setdefault(weight.decay(self.config), []).append((weight, kept))
            for decay, some in by_decay.items():
                self._update(some, learning_rate, decay)

    def _update(self, some: Sequence[tuple[TrainedWeight, Kept]], learning_rate: float, decay: float) -> None:
        """Update weights with the same decay at once; ranks have parts of them, and an update needs no other."""
        means, squares = ([kept[kind] for _, kept in some] for kind in MOMENTS)
        adamw(
            [weight.local for weight, _ in some],
            [gradient for weight, _ in some if (gradient := weight.gradient) is not None],
            means,
            squares,
            [],
            [self._numbers[weight.parameter] for weight, _ in some],
            fused=self._is_fused,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=learning_rate,
            weight_decay=decay,
            eps=self.config.epsilon,
            maximize=False,
        )

    def resume(self, num_updates: int) -> None:
        """Continue behind some steps."""
        super().resume(num_updates)
        for number in self._numbers.values():
            number.fill_(float(num_updates))


class RoundedAdamW(Optimizer):
    """AdamW that keeps its moments in bfloat16.

    A step computes in float32, and changes the weights by the moments before they are rounded, which is stochastic: see
    `rounding`.
    """

    def __init__(
        self, weights: Iterable[TrainedWeight], config: OptimizerConfig, memory: StateMemory | None = None
    ) -> None:
        """Take weights, and memory for moments."""
        super().__init__(weights, config, memory)
        self._keep(self.weights, moments_of(torch.bfloat16))

    def _step(self, learning_rate: float) -> None:
        for weight, kept in chain.from_iterable(self._groups(self.weights)):
            self._update(weight, kept, learning_rate)

    def _update(self, weight: TrainedWeight, kept: Kept, learning_rate: float) -> None:
        config, local, gradient, number = self.config, weight.local, weight.gradient, self.num_updates + 1
        assert gradient is not None
        means, squares = (kept[kind] for kind in MOMENTS)
        rate, root = learning_rate / (1 - config.beta1**number), sqrt(1 - config.beta2**number)
        for piece in pieces(local):
            mean = means[piece].float().lerp_(gradient[piece], 1 - config.beta1)
            square = squares[piece].float().lerp_(gradient[piece].square(), 1 - config.beta2)
            own = local[piece].mul_(1 - learning_rate * weight.decay(config))
            own.addcdiv_(mean, (square.sqrt() / root).add_(config.epsilon), value=-rate)
            words = random_words(weight.name, self.num_updates, weight.shape, weight.block, piece, local.device)
            means[piece] = rounded(mean, words)
            squares[piece] = rounded(square, words >> BITS)


def may_be_fused(device: torch.device, process_group: ProcessGroup) -> bool:
    """Whether the devices of all ranks compute AdamW in one kernel. All ranks call it together."""
    if device.type in {"cpu", "cuda"}:
        return True
    lacks = torch.tensor(not _can_be_fused(device))
    if not int(process_group.max(lacks.long(), "whether AdamW is one kernel")):
        return True
    if process_group.rank == process_group.ranks[0]:
        warnings.warn(f"AdamW starts many kernels, as a trial of the fused one fails on {device.type}", stacklevel=2)
    return False


@cache
def _can_be_fused(device: torch.device) -> bool:
    """Try a fused step on a device."""
    weight = nn.Parameter(torch.ones(4, device=device))
    weight.grad = torch.full_like(weight, 2.0)
    try:
        torch.optim.AdamW([weight], lr=0.25, fused=True).step()
    except (RuntimeError, TypeError):  # not there for this kind of device
        return False
    return True
