"""Muon: momentum of which each matrix is made orthogonal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from leaderless.config.models import OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import Pool, Shape
from leaderless.distributed.weights.tensor_parallel import is_of_experts
from leaderless.planner.memory.layers import LAYER, sees
from leaderless.training.optimizers.adamw import make_adamw
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight
from leaderless.training.optimizers.rounding import pieces, random_words, rounded
from leaderless.training.optimizers.sgd import MOMENTUM
from leaderless.training.optimizers.state_memory import StateMemory, StateSpec
from leaderless.training.optimizers.whole_matrices import WholeMatrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, of X X' X and of X X' X X' X in an iteration."""
NUM_ITERATIONS = 5
LEAST_NORM = 1e-7
"""Norm by which shorter matrices are divided."""
RMS = 0.2
"""Root of the mean square of what the learning rate multiplies, about that of updates of AdamW."""


MOST_AT_ONCE = 1 << 26
"""Numbers of experts that are made orthogonal at the same time, if one has no more."""


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """Whether a weight is a matrix, or a batch of experts, of a layer that reads text, and so is trained by Muon."""
    if LAYER.search(name) is None or sees(name) or name.endswith("bias"):
        return False
    return len(shape) == 2 or is_of_experts(name, shape)


def whole_matrices(shapes: Mapping[str, Shape], holders: Pool, process_group: ProcessGroup) -> WholeMatrices | None:
    """The way of these of some weights to the ranks that own them; None for a single rank."""
    hidden = {name: tuple(shape) for name, shape in shapes.items() if is_hidden_matrix(name, tuple(shape))}
    return WholeMatrices(hidden, holders, process_group) if process_group.size > 1 else None


class Muon(Optimizer):
    """Muon for the matrices of layers that read text, and AdamW for all other weights.

    Formula: m <- momentum m + (1 - momentum) gradient; u = (1 - momentum) gradient + momentum m, which is Nesterov's;
    w <- (1 - learning rate * decay) w - learning rate * 0.2 sqrt(max(rows, columns)) orthogonal(u).
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, with its coefficients and
    iterations; Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982, equation 4, for the factor, which
    lets one learning rate and one decay serve AdamW, too. As in PyTorch, momentum is an average and not a sum, which
    changes the length of u alone, and this is normalized. A weight that several projections share counts as one matrix,
    and each expert as one.

    Momentum is kept in `state_dtype`; in bfloat16 it is rounded stochastically, after the step has used it.
    """

    def __init__(
        self,
        weights: Iterable[TrainedWeight],
        config: OptimizerConfig,
        *,
        is_fused: bool,
        matrices: WholeMatrices | None,
        dtype: torch.dtype,
        memory: StateMemory | None = None,
    ) -> None:
        """Take weights.

        Args:
            weights: Trained weights on this rank.
            config: Settings.
            is_fused: Whether AdamW is to be one kernel.
            matrices: Way of matrices to ranks that own them; None if ranks hold all matrices whole.
            dtype: Type in which matrices are made orthogonal.
            memory: Memory for what is kept.
        """
        super().__init__(weights, config, memory)
        self._hidden = [one for one in self.weights if is_hidden_matrix(one.name, one.shape)]
        mine = {one.parameter for one in self._hidden}
        others = [one for one in self.weights if one.parameter not in mine]
        self._others = make_adamw(others, config, is_fused=is_fused, memory=self._memory)
        self._matrices, self._dtype = matrices, dtype
        kept: torch.dtype = getattr(torch, config.state_dtype)
        self._keep(self._hidden, lambda one: {MOMENTUM: StateSpec(tuple(one.local.shape), kept)})

    def _step(self, learning_rate: float) -> None:
        self._others.step(learning_rate)
        moved = {
            one.name: self._momentum(one, *kept.values()) for some in self._groups(self._hidden) for one, kept in some
        }
        parts = {
            one.name: replace(one.placed, local=moved[one.name] if one.name in moved else torch.zeros_like(one.local))
            for one in self._hidden
        }
        owned = parts if self._matrices is None else self._matrices.owned(parts)
        for one in owned.values():
            _make_orthogonal(one.local, self._dtype)
        if self._matrices is not None:
            self._matrices.give_back(owned, parts)
        for weight in self._hidden:
            if weight.gradient is not None:
                own = weight.local.mul_(1 - learning_rate * weight.decay(self.config))
                factor = RMS * sqrt(max(weight.shape[-2:]))
                own.sub_(parts[weight.name].local, alpha=learning_rate * factor)

    def _momentum(self, weight: TrainedWeight, kept: Tensor) -> Tensor:
        """Update the momentum of a weight, and look ahead, in the memory of the gradient."""
        decay, gradient = self.config.momentum_decay, weight.gradient
        assert gradient is not None
        if kept.dtype == torch.float32:
            return gradient.lerp_(kept.lerp_(gradient, 1 - decay), decay)
        for piece in pieces(kept):
            own = kept[piece].float().lerp_(gradient[piece], 1 - decay)
            gradient[piece].lerp_(own, decay)
            words = random_words(weight.name, self.num_updates, weight.shape, weight.block, piece, kept.device)
            kept[piece] = rounded(own, words)
        return gradient

    def states(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """The momentum of a matrix; both moments of another weight."""
        return super().states(parameter) if parameter in self._keeps else self._others.states(parameter)

    def resume(self, num_updates: int) -> None:
        """Continue behind some steps."""
        super().resume(num_updates)
        self._others.resume(num_updates)


def _make_orthogonal(matrices: Tensor, dtype: torch.dtype) -> None:
    """Make one matrix or each of a batch orthogonal, in place."""
    if not matrices.numel():
        return
    batch = matrices if matrices.ndim > 2 else matrices[None]
    for some in torch.split(batch, max(1, MOST_AT_ONCE // batch[0].numel())):
        some.copy_(orthogonal(some, dtype))


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices with about the same singular vectors, and singular values of about 1: by the Newton-Schulz iteration.

    Args:
        matrices: One matrix, or a batch, [..., rows, columns].
        dtype: Type in which to compute.

    Returns:
        As many matrices, in `dtype`; singular values are between 0.7 and 1.2, unless they were tiny next to the largest
        one, and those of a matrix of zeros are 0.
    """
    first, second, third = COEFFICIENTS
    found: Tensor = matrices.to(dtype)
    is_tall = found.shape[-2] > found.shape[-1]
    found = found.mT if is_tall else found
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        squared = found @ found.mT
        found = first * found + (second * squared + third * (squared @ squared)) @ found
    return found.mT if is_tall else found
