"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from leaderless.config.models import OptimizerConfig
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight
from leaderless.training.optimizers.rounding import pieces, random_words, rounded
from leaderless.training.optimizers.state_memory import StateMemory, StateSpec

MOMENTUM = "momentum"


class Sgd(Optimizer):
    """SGD with momentum, and with weight decay on matrices only.

    Formula: m <- momentum m + gradient; w <- (1 - learning rate * decay) w - learning rate * m, with m = 0 at first.
    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, eq. 1, in
    PyTorch's form, in which the learning rate is no part of m; Loshchilov and Hutter, arXiv 1711.05101, Algorithm 1,
    for the decay that is no part of m either. Momentum in bfloat16 is rounded stochastically, after the step.
    """

    def __init__(
        self, weights: Iterable[TrainedWeight], config: OptimizerConfig, memory: StateMemory | None = None
    ) -> None:
        """Take weights, and memory for momentum."""
        super().__init__(weights, config, memory)
        kinds = (MOMENTUM,) if config.momentum_decay else ()
        dtype: torch.dtype = getattr(torch, config.state_dtype)
        self._keep(self.weights, lambda one: {kind: StateSpec(tuple(one.local.shape), dtype) for kind in kinds})

    def _step(self, learning_rate: float) -> None:
        for weight, kept in chain.from_iterable(self._groups(self.weights)):
            gradient = weight.gradient
            assert gradient is not None
            weight.local.mul_(1 - learning_rate * weight.decay(self.config))
            for momentum in kept.values():
                keep_momentum(weight, momentum, self.config.momentum_decay, gradient, self.num_updates)
            weight.local.sub_(gradient, alpha=learning_rate)


def keep_momentum(weight: TrainedWeight, kept: Tensor, decay: float, gradient: Tensor, update: int) -> None:
    """Write `decay * kept + gradient` into both; into `kept` as it is rounded, if it is in bfloat16."""
    if kept.dtype == torch.float32:
        gradient.add_(kept, alpha=decay)
        kept.copy_(gradient)
        return
    for piece in pieces(kept):
        own = gradient[piece].add_(kept[piece].float(), alpha=decay)
        words = random_words(weight.name, update, weight.shape, weight.block, piece, kept.device)
        kept[piece] = rounded(own, words)
