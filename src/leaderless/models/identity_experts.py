"""Mixtures some of whose experts compute nothing, as those of LongCat-Flash (arXiv 2509.01322)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

IDENTITY_EXPERTS = "zero_expert_num"
"""Attribute of modules that have experts without weights: their number, after those that have some."""


def give_weights_gradients(model: nn.Module) -> None:
    """Give the weights of experts a gradient in every pass, of 0 where all tokens go through experts without weights.

    Else ranks, whose tokens choose other experts, would not have gradients of the same weights to sum.
    """
    for module in model.modules():
        if getattr(module, IDENTITY_EXPERTS, 0) and (weights := [*module.parameters(recurse=False)]):
            module.forward = _Experts(module, min(map(len, weights)))


class _Experts:
    """Replacement of a module's forward pass."""

    def __init__(self, module: nn.Module, num_with_weights: int) -> None:
        self._module, self._num_with_weights = module, num_with_weights
        self._forward = cast("Callable[[Tensor, Tensor, Tensor], Tensor]", module.forward)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply experts [T, k] with weights [T, k] to tokens [T, hidden]."""
        found = self._forward(hidden_states, top_k_index, top_k_weights)
        if not torch.is_grad_enabled() or bool((top_k_index < self._num_with_weights).any()):
            return found
        # The weights are read now: a back end may have put others in their place.
        return found + sum(0.0 * weight.sum() for weight in self._module.parameters(recurse=False))
