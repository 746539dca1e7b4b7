from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from . import parallel_state


@dataclass
class DistributedDataParallelConfig:
    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    use_distributed_optimizer: bool = False


class DistributedDataParallel(nn.Module):
    """Gradients add up in `main_grad`, in float32, until the buffer is set to zero.

    Hooks add them, as in Megatron, on nodes of autograd that a parameter loses when its data get another type.
    """

    def __init__(self, config, ddp_config, module):
        super().__init__()
        assert ddp_config.grad_reduce_in_fp32
        self.config, self.module = config, module
        self.grad_accs = []
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(self._adder(parameter))
            self.grad_accs.append(node)
        self.is_reduced = False

    def _adder(self, parameter):
        def add(*_):
            assert not self.is_reduced, "the buffer was not set to zero after it was reduced"
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        return add

    def forward(self, *inputs, **kwargs):
        assert self.training is torch.is_grad_enabled(), "passes without gradient are for evaluation"
        return self.module(*inputs, **kwargs)

    def zero_grad_buffer(self):
        for parameter in self.parameters():
            parameter.main_grad.zero_()
        self.is_reduced = False


def finalize_model_grads(model, num_tokens=None, pg_collection=None, force_all_reduce=False):
    (chunk,) = model
    for parameter in chunk.parameters():
        if parallel_state.world_size() > 1:
            dist.all_reduce(parameter.main_grad)
    chunk.is_reduced = True
    if num_tokens is not None:
        for parameter in chunk.parameters():
            parameter.main_grad *= 1.0 / torch.clamp(num_tokens, min=1)
