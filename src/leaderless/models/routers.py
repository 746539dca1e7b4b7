"""Routers of mixtures of experts: the choices of a pass are recorded, replayed, and pulled towards equal loads.

An engine computes in other shapes than the trainer, and where two experts are nearly equal they choose differently:
the trained model would be another one than that which sampled. Replayed choices (R3, arXiv 2510.11370) prevent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from leaderless.config import RecipeError
from leaderless.planner.checks.capabilities import MOST_EXPERTS

ROUTERS = ("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3VLMoeTextTopKRouter")
"""Classes of `transformers` that take the softmax of all experts, and the largest of it."""
FAMILIES = "qwen2_moe, qwen3_moe, qwen3_vl_moe and mixtral"
"""Families of models that have them."""
UNKNOWN = MOST_EXPERTS
"""In place of an expert that was not recorded: the router chooses."""


@dataclass
class RoutedPass:
    """The choices of one pass over T tokens.

    Attributes:
        replayed: [T, layers, k] uint8 experts to use, `UNKNOWN` where routers choose; None if they always do.
        chosen: [T, k] uint8 experts that each layer has used, by its number among those with experts.
        pull: [layers, experts] float32, the gradient that is added to each expert's probability at a token of weight 1;
            None for none.
        weights: [T] float32, number of sampled tokens that are predicted at each token.
        probabilities: [experts] float32, weighted sum of each layer's probabilities.
    """

    replayed: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    pull: Tensor | None = None
    weights: Tensor | None = None
    probabilities: dict[int, Tensor] = field(default_factory=dict)

    def choices(self) -> Tensor:
        """[T, layers * k] uint8: the experts that all layers have used for each token."""
        return torch.cat([self.chosen[layer] for layer in range(len(self.chosen))], dim=1)

    def loads(self, num_layers: int, num_experts: int) -> Tensor:
        """[2, layers, experts] float32: how often each expert was chosen where a sampled token is predicted, weighted.

        Also the sum of its probabilities there; 0 in layers that are elsewhere.
        """
        assert self.weights is not None
        loads = self.weights.new_zeros(2, num_layers, num_experts)
        for layer, chosen in self.chosen.items():
            experts = chosen.long()
            weights = self.weights.unsqueeze(1).expand_as(experts)
            loads[0, layer].index_add_(0, experts.flatten(), weights.flatten())
            loads[1, layer] = self.probabilities[layer]
        return loads


class Routers:
    """The routers of a model, whose choices can be seen and made.

    Attributes:
        now: The current pass. Its backward pass may compute layers again, so it stays until the next one.
        layers: Layers that have experts, by their number among all layers.
    """

    def __init__(self, routers: Sequence[nn.Module], layers: Sequence[int]) -> None:
        """Take the place of the forward passes of some routers, layer by layer."""
        self.now, self.layers = RoutedPass(), layers
        self.num_layers = len(routers)
        self.num_experts, self.num_chosen = (
            cast("int", getattr(routers[0], name)) for name in ("num_experts", "top_k")
        )
        for layer, router in enumerate(routers):
            router.forward = _Router(self, layer, router)

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """The routers of a model; None if it has none that are known, or more experts than can be distinguished."""
        found = {name: module for name, module in model.named_modules() if type(module).__name__ in ROUTERS}
        most = max((cast("int", router.num_experts) for router in found.values()), default=0)
        if not found or most > MOST_EXPERTS:
            return None
        return cls([*found.values()], [int(name.partition(".layers.")[2].partition(".")[0]) for name in found])

    @classmethod
    def required(cls, model: nn.Module, key: str) -> Routers:
        """The routers of a model whose choices are to be replayed.

        Raises:
            RecipeError: There are none; the error is at the key of the model.
        """
        routers = cls.of(model)
        if routers is None:
            raise RecipeError.at(
                key,
                f"has no routers whose choices algorithm.replay_experts could replay: they can be those of {FAMILIES}, "
                f"with at most {MOST_EXPERTS} experts; leave it out",
            )
        return routers

    def begin(self, replayed: Tensor | None = None, weights: Tensor | None = None, pull: Tensor | None = None) -> None:
        """Begin a pass; `replayed` is [T, layers * k] uint8, and see `RoutedPass`.

        Raises:
            RuntimeError: The recorded choices come from another model.
        """
        if replayed is not None:
            if replayed.shape[1] != self.num_layers * self.num_chosen:
                raise RuntimeError(
                    f"{replayed.shape[1]} experts were recorded for each token, but the model that replays them "
                    f"chooses {self.num_chosen} in each of {self.num_layers} layers: it must be the one that sampled"
                )
            replayed = replayed.view(-1, self.num_layers, self.num_chosen)
        self.now = RoutedPass(replayed, pull=pull, weights=weights)


class _Router:
    """Replacement of a router's forward pass."""

    def __init__(self, routers: Routers, layer: int, router: nn.Module) -> None:
        self._routers, self._layer, self._forward = routers, layer, router.forward
        self._is_normalized = bool(getattr(router, "norm_topk_prob", True))

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logits [T, experts], weights [T, k] and experts [T, k] int64.

        Weights are the same function of the logits whoever has chosen: w_i = e^{s_i} / sum_j e^{s_j} over the chosen
        experts j, or over all of them in models that leave it at that.
        """
        now = self._routers.now
        logits, scores, chosen = self._forward(hidden_states)
        if now.replayed is not None or now.pull is not None:
            probabilities = logits.softmax(dim=-1, dtype=torch.float32)
            if now.pull is not None:
                assert now.weights is not None
                pull = now.weights.unsqueeze(1) * now.pull[self._layer]
                probabilities = cast("Tensor", _Pulled.apply(probabilities, pull))  # type: ignore[no-untyped-call]
            if now.replayed is not None:
                recorded = now.replayed[:, self._layer].long()
                chosen = torch.where(recorded == UNKNOWN, chosen, recorded)
            top = probabilities.gather(1, chosen)
            scores = (top / top.sum(dim=-1, keepdim=True) if self._is_normalized else top).to(scores.dtype)
        now.chosen[self._layer] = chosen.detach().to(torch.uint8)
        if now.weights is not None:
            now.probabilities[self._layer] = now.weights @ logits.detach().softmax(dim=-1, dtype=torch.float32)
        return logits, scores, chosen


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Pulled(torch.autograd.Function):
    """Values as they are, with something added to their gradient."""

    @staticmethod
    def forward(ctx: _Context, values: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad + ctx.saved_tensors[0], None
