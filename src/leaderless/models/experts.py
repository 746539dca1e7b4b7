"""Expert parallelism: ranks divide the experts of each layer, and send tokens to those that have their experts.

A token needs few experts of a layer, so it would be a waste to gather all of them on every rank. Here each rank keeps
its own, and gets the tokens of all ranks that are for them (GShard, arXiv 2006.16668). No token is ever dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from inspect import signature
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from leaderless.data.transport import ProcessGroup

ROUTED = "tokens for the experts of other ranks"
CHOICES = {"top_k_index", "top_k_weights"}
"""Arguments of modules with experts that can be divided; some families, as JetMoE, call theirs in other ways."""


def divide_experts(model: nn.Module, peers: ProcessGroup, mesh: DeviceMesh, device: torch.device) -> set[nn.Parameter]:
    """Leave a rank only its experts of a model that is whole.

    Args:
        model: Model with experts.
        peers: Ranks that divide them.
        mesh: The same ranks.
        device: Device of the weights from now on.

    Returns:
        The weights of this rank's experts, each as the part of a whole one.
    """
    own: set[nn.Parameter] = set()
    for module in expert_modules(model):
        module.forward = _Experts(module, peers, mesh, device)
        own.update(module.parameters())
    return own


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
    """What takes the place of a module's forward pass."""

    def __init__(self, module: nn.Module, peers: ProcessGroup, mesh: DeviceMesh, device: torch.device) -> None:
        """Divide the weights of a module, and keep a copy of it that has the rank's own experts alone."""
        self._module, self._peers = module, peers
        self._num_own = _num_experts(module) // peers.size
        self._own = copy.copy(module)
        self._own.num_experts = self._num_own  # type: ignore[assignment]
        self._own._parameters = {}  # noqa: SLF001 - the copy has shared those of the module
        for name, weight in list(module.named_parameters(recurse=False)):
            part = weight.detach().chunk(peers.size)[mesh.get_local_rank()].clone()
            part = part if part.is_meta else part.to(device)  # values come later
            whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=weight.requires_grad))
            self._own.register_parameter(name, nn.Parameter(part.to("meta"), requires_grad=False))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply experts [T, k] with weights [T, k] to the tokens [T, hidden] of this rank."""
        num_choices = top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)
        experts = top_k_index.flatten()[order]
        counts = torch.bincount(experts // self._num_own, minlength=self._peers.size)
        arriving = self._peers.swap(counts, ROUTED)
        sent, received = counts.tolist(), arriving.tolist()
        # A token's results, and its gradients, are added up over its choices, in float32 and in a fixed order; adding
        # them to their places one by one would round each time, and on accelerators in the order in which they come.
        copies = hidden_states.unsqueeze(1).expand(-1, num_choices, -1).flatten(0, 1)
        rows = _moved(copies.index_select(0, order), self._peers, sent, received)
        wanted = self._peers.swap_uneven(experts % self._num_own, sent, received, ROUTED)
        results = _moved(self._apply(rows, wanted), self._peers, received, sent)
        weighted = results * top_k_weights.flatten()[order].unsqueeze(1)
        by_token = weighted.index_select(0, order.argsort()).view(*top_k_index.shape, -1)
        return by_token.sum(1).to(hidden_states.dtype)

    def _apply(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Apply this rank's experts, [n], one to each of the rows [n, hidden]."""
        weights = {name: _local(one).to(rows.dtype) for name, one in self._module.named_parameters(recurse=False)}
        if not len(rows):  # the weights have a gradient all the same, of 0, and so have what other ranks have sent
            return rows + sum(weight.sum() * 0 for weight in weights.values())
        ones = rows.new_ones(len(rows), 1)
        result: Tensor = torch.func.functional_call(self._own, weights, (rows, experts.unsqueeze(1), ones))
        return result


def _local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _moved(values: Tensor, peers: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """What other ranks have sent here, after some rows for each of them have been sent."""
    moved: Tensor = _Moved.apply(values.contiguous(), peers, sent, received)  # type: ignore[no-untyped-call]
    return moved


class _Context(FunctionCtx):
    peers: ProcessGroup
    sent: list[int]
    received: list[int]


class _Moved(torch.autograd.Function):
    """Rows sent to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: _Context, values: Tensor, peers: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.peers, ctx.sent, ctx.received = peers, sent, received
        return peers.swap_uneven(values, sent, received, ROUTED)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.swap_uneven(grad.contiguous(), ctx.received, ctx.sent, ROUTED), None, None, None
