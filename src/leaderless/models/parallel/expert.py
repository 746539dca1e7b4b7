"""Expert parallelism: ranks divide the experts of each layer, and send tokens to those that have their experts.

A token needs few experts of a layer, so it would be a waste to gather all of them on every rank. Here each rank keeps
its own, and gets the tokens of its peers that are for them (GShard, arXiv 2006.16668). No token is ever dropped. Ranks
along `tp` have the same tokens: each sends some of them, and then they gather the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from leaderless.config import RecipeError
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import part_of
from leaderless.distributed.weights.tensor_parallel import copies_dim, is_of_experts
from leaderless.models.parallel.reductions import mapped

if TYPE_CHECKING:
    from leaderless.models.decoder import Decoder

ROUTED = "tokens for the experts of other ranks"
RESULTS = "results of experts for the tokens of other ranks"
CHOICES = {"top_k_index", "top_k_weights"}
"""Arguments of modules with experts that can be divided; some families, as JetMoE, call theirs in other ways."""


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that divide the experts of a model.

    Attributes:
        peers: Ranks with an equal share of the experts each, which send tokens to each other.
        mesh: Mesh of these along `ep` and, if there are several, of ranks with the same experts along `copies`.
        modules: Modules of the model that hold experts.
        shapes: Shapes of the whole weights of experts, by name.
    """

    peers: ProcessGroup
    mesh: DeviceMesh
    modules: Sequence[nn.Module]
    shapes: Mapping[str, torch.Size]

    @classmethod
    def divide(
        cls, decoder: Decoder, peers: ProcessGroup, mesh: DeviceMesh, sharers: ProcessGroup | None, key: str
    ) -> None:
        """Leave a rank only its experts of a model that is whole, and have the ranks exchange tokens.

        Args:
            decoder: Model with experts.
            peers: Ranks that divide them.
            mesh: Mesh as in `ExpertParallel`.
            sharers: Ranks that have the same tokens, if there are several.
            key: Setting of the model, for errors.

        Raises:
            RecipeError: The experts have a name from which other ranks would not know how they are divided.
        """
        modules, own = expert_modules(decoder.model), set[nn.Parameter]()
        for module in modules:
            own.update(module.parameters())
        named = [(name, weight) for name, weight in decoder.model.named_parameters() if weight in own]
        if unknown := [name for name, weight in named if not is_of_experts(name, weight.shape)]:
            kind = decoder.model.config.model_type
            reason = f"ranks cannot divide the experts of models of type {kind}, as {unknown[0]}"
            raise RecipeError.at(key, f"{reason}; leave out ep")
        decoder.expert_parallel = cls(peers, mesh, modules, {name: weight.shape for name, weight in named})
        for module in modules:
            forward = _Experts(module, peers)
            module.forward = forward if sharers is None else _Shared(forward, sharers)
        for _, weight in named:
            weight.data = weight.chunk(peers.size)[peers.ranks.index(peers.rank)].clone()

    @property
    def kept(self) -> set[nn.Parameter]:
        """Weights that no other rank has a part of: there is nothing to gather."""
        return set() if self._num_copies > 1 else {weight for module in self.modules for weight in module.parameters()}

    @property
    def gathered(self) -> Sequence[nn.Module]:
        """Modules whose weights are divided among the ranks with the same experts."""
        return self.modules if self._num_copies > 1 else ()

    @property
    def _num_copies(self) -> int:
        return self.mesh.size() // self.peers.size

    def placement(self, weight: Tensor) -> Shard:
        """How ranks with the same experts divide a weight of theirs."""
        shape = (len(weight) * self.peers.size, *weight.shape[1:])
        return Shard(copies_dim(shape, self.peers.size, self._num_copies))

    def whole(self, name: str, local: Tensor) -> DTensor:
        """Part of the whole that a rank holds of a weight of `shapes`, or of what the optimizer keeps of it."""
        shape = torch.Size((*self.shapes[name][:-1], local.shape[-1]))  # which no ranks divide
        placements = [Shard(0), Shard(copies_dim(tuple(shape), self.peers.size, self._num_copies))]
        return part_of(local, self.mesh, placements[: self.mesh.ndim], shape)


def expert_modules(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that hold all experts of a layer, each with weights [experts, ...]."""
    return [module for module in model.modules() if _num_experts(module)]


def num_experts(model: nn.Module) -> int:
    """Experts of a layer; 0 for a model without any."""
    return max(map(_num_experts, model.modules()), default=0)


def _num_experts(module: nn.Module) -> int:
    """The experts of a module that has all of a layer, and is called with the experts that tokens have chosen."""
    weights = dict(module.named_parameters(recurse=False))
    count = getattr(module, "num_experts", None)
    is_stacked = bool(weights) and all(one.ndim == 3 and len(one) == count for one in weights.values())
    return cast("int", count) if is_stacked and signature(module.forward).parameters.keys() >= CHOICES else 0


class _Experts:
    """Replacement of a module's forward pass."""

    def __init__(self, module: nn.Module, peers: ProcessGroup) -> None:
        self._module, self._peers = module, peers
        self._num_own = _num_experts(module) // peers.size
        self._own = _without_weights(module)
        self._own.num_experts = self._num_own  # type: ignore[assignment]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply experts [T, k] with weights [T, k] to the tokens [T, hidden] of this rank."""
        num_choices = top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)
        experts = top_k_index.flatten()[order]
        # Counted without `bincount`, for whose size the host would wait; so it waits only once for all numbers.
        ends = self._num_own * torch.arange(self._peers.size + 1, device=experts.device)
        received, sent = self._peers.swap_numbers(torch.searchsorted(experts, ends).diff(), ROUTED)
        # A token's results, and its gradients, are added up over its choices, in float32 and in a fixed order; adding
        # them to their places one by one would round each time, and on accelerators in the order in which they come.
        copies = hidden_states.unsqueeze(1).expand(-1, num_choices, -1).flatten(0, 1)
        rows = _moved(copies.index_select(0, order), self._peers, sent, received)
        wanted = self._peers.swap_uneven(experts % self._num_own, sent, received, ROUTED)
        results = _moved(self._apply(rows, wanted), self._peers, received, sent)
        weighted = results * top_k_weights.flatten()[order].unsqueeze(1)
        by_token = weighted.index_select(0, order.argsort()).view(*top_k_index.shape, hidden_states.shape[1])
        return by_token.sum(1).to(hidden_states.dtype)

    def _apply(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Apply this rank's experts, [n], one to each of the rows [n, hidden]."""
        weights = {name: one.to(rows.dtype) for name, one in self._module.named_parameters(recurse=False)}
        if not len(rows):  # the weights have a gradient all the same, of 0, and so have what other ranks have sent
            return rows + sum(weight.sum() * 0 for weight in weights.values())
        ones = rows.new_ones(len(rows), 1)
        result: Tensor = torch.func.functional_call(self._own, weights, (rows, experts.unsqueeze(1), ones))
        return result


def _without_weights(module: nn.Module) -> nn.Module:
    """A module that computes like another one, without its weights, and without what others hook onto it later."""
    own: nn.Module = type(module).__new__(type(module))
    nn.Module.__init__(own)
    names = {*vars(own)}
    vars(own).update({name: value for name, value in vars(module).items() if name not in names})
    own._modules, own._buffers, own.training = module._modules, module._buffers, module.training  # noqa: SLF001
    for name, weight in module.named_parameters(recurse=False):
        own.register_parameter(name, nn.Parameter(weight.detach()[:0].to("meta"), requires_grad=False))
    return own


@dataclass(frozen=True)
class _Shared:
    """The forward pass of ranks that have the same tokens: each computes some of them, and gets the results of all."""

    forward: _Experts
    sharers: ProcessGroup

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts to a part of the tokens, and gather the results of the other parts."""
        count, sharers = len(hidden_states), self.sharers
        inputs = (
            mapped(values, lambda own: _part(own, sharers).clone(), lambda grad: _joined(grad, sharers, count))
            for values in (hidden_states, top_k_index, top_k_weights)
        )
        return mapped(
            self.forward(*inputs),
            lambda own: _joined(own, sharers, count).clone(),  # a view that is added to in place would lose its hooks
            lambda grad: _part(grad, sharers),
        )


def _part(values: Tensor, sharers: ProcessGroup) -> Tensor:
    """A rank's part of [T, ...]: the parts follow one another, and the last ones may be smaller or empty."""
    size, place = -(-len(values) // sharers.size), sharers.ranks.index(sharers.rank)
    return values[place * size : (place + 1) * size]


def _joined(part: Tensor, sharers: ProcessGroup, count: int) -> Tensor:
    """[T, ...] of which each rank has a part."""
    padded = part.new_zeros(-(-count // sharers.size), *part.shape[1:])
    padded[: len(part)] = part
    return sharers.gather_even(padded, RESULTS).flatten(0, 1)[:count]


def _moved(values: Tensor, peers: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """Rows that other ranks have sent here, after rows for each of them were sent; gradients go back the same way."""
    return mapped(
        values.contiguous(),
        lambda own: peers.swap_uneven(own, sent, received, ROUTED),
        lambda grad: peers.swap_uneven(grad.contiguous(), received, sent, ROUTED),
    )
