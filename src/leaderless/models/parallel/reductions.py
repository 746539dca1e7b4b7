"""Values that several ranks have in common, or are the sum of, with their gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup

ADDENDS = "addends of ranks that divide a layer"


def copied(values: Tensor, peers: ProcessGroup) -> Tensor:
    """The same values on all ranks, whose gradient is the sum of those that the ranks compute."""
    result: Tensor = _Copied.apply(values, peers)  # type: ignore[no-untyped-call]
    return result


def summed(values: Tensor, peers: ProcessGroup) -> Tensor:
    """The sum of the values of all ranks, whose gradient all of them compute."""
    result: Tensor = _Summed.apply(values, peers)  # type: ignore[no-untyped-call]
    return result


class _Context(FunctionCtx):
    peers: ProcessGroup


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, values: Tensor, peers: ProcessGroup) -> Tensor:
        ctx.peers = peers
        return values.view_as(values)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(grad.contiguous(), ADDENDS, most_ahead=MESSAGES_AHEAD), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, values: Tensor, peers: ProcessGroup) -> Tensor:  # noqa: ARG004
        return peers.sum(values.contiguous(), ADDENDS, most_ahead=MESSAGES_AHEAD)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
