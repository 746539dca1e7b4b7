"""Linear layers whose weights never change, and may have 4 bits a number (QLoRA, Dettmers et al., arXiv 2305.14314).

A number is one of the 16 values of NF4, the quantiles of a normal distribution, times the scale of its block, which is
the largest absolute value there. bitsandbytes quantizes, and computes the numbers again. A row of a weight is packed by
itself:

    row of a weight       | block 0 | block 1 | …                   [inputs]
    packed row, in bytes  | two numbers in a byte … | scales, in float32 … |

So ranks that divide rows, or rows at the borders of blocks, have the same numbers as a rank alone, and packed weights
are divided, gathered and sent as others are. Deviation from the paper: scales are not quantized once more, which would
save 0.37 bits a number at most, because the result would depend on which rows a rank has.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from leaderless.config import RecipeError
from leaderless.config.packaged_files import how_to_install
from leaderless.planner.memory.layers import packed_bytes

PIECE = 1 << 20
"""Numbers that are quantized at a time, of which bitsandbytes makes several copies on a CPU."""


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is not trained.

    Attributes:
        block: Numbers that share a scale, if the weight is packed or will be; else 0.
    """

    block: int = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - named so in the base class
        """Compute the layer."""
        return self.product(input, self.bias)

    def product(self, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of values [..., inputs] with the weight, and a bias."""
        if self.weight.dtype is not torch.uint8:
            return linear(values, self.weight, bias)
        result: Tensor = _PackedProduct.apply(values, self.weight, bias, self.block)  # type: ignore[no-untyped-call]
        return result

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight, [outputs, inputs], in a type if it is packed."""
        if self.weight.dtype is not torch.uint8:
            return self.weight
        return unpacked(self.weight, self.block, dtype)


class _Context(FunctionCtx):
    block: int
    needs_input_grad: tuple[bool, ...]


class _PackedProduct(torch.autograd.Function):
    """The product with a packed weight; the backward pass unpacks it again, so that no numbers stay between passes."""

    @staticmethod
    def forward(ctx: _Context, values: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.block = block
        return linear(values, unpacked(weight, block, values.dtype), bias)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (weight,) = cast("tuple[Tensor]", ctx.saved_tensors)  # type: ignore[attr-defined]
        return grad @ unpacked(weight, ctx.block, grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None


def check_library(key: str) -> None:
    """Import bitsandbytes, which gives torch its operations; the error is at the model's key where it is missing."""
    if find_spec("bitsandbytes") is None:
        raise RecipeError.at(f"{key}.lora.base_dtype", f"'nf4' needs bitsandbytes: {how_to_install('nf4')}")
    # It warns on some CPUs of a product that it would download, which is not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes  # noqa: F401


def packed(weight: Tensor, block: int) -> Tensor:
    """Pack a weight.

    Args:
        weight: [outputs, inputs], in float32.
        block: Numbers that share a scale, which divide the inputs.

    Returns:
        [outputs, bytes of a row], uint8; without values if the weight has none.
    """
    outputs, inputs = weight.shape
    result = torch.empty(outputs, packed_bytes(inputs, block), dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return result
    for begin in range(0, outputs, rows := max(1, PIECE // inputs)):
        own, target = weight[begin : begin + rows], result[begin : begin + rows]
        codes, scales = torch.ops.bitsandbytes.quantize_4bit(own.contiguous(), block, "nf4", torch.uint8)
        target[:, : inputs // 2] = codes.view(len(own), -1)
        target[:, inputs // 2 :] = scales.view(len(own), -1).view(torch.uint8)
    return result


def unpacked(weight: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The numbers of a packed weight, [outputs, inputs], in a type."""
    outputs, width = weight.shape
    num_blocks = width // packed_bytes(block, block)
    inputs = num_blocks * block
    if not outputs:
        return torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    codes = weight[:, : inputs // 2].contiguous()
    # A copy also of a single row, which may lie where no float32 can.
    scales = weight[:, inputs // 2 :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    unpack = torch.ops.bitsandbytes.dequantize_4bit
    numbers: Tensor = unpack(codes.view(-1, 1), scales.view(-1), block, "nf4", (outputs, inputs), dtype)
    return numbers


def pack_layers(model: nn.Module) -> None:
    """Pack the weights of layers that have a block, one after the other; those without values stay without."""
    for module in model.modules():
        if isinstance(module, FrozenLinear) and module.block and module.weight.dtype is not torch.uint8:
            module.weight = nn.Parameter(packed(module.weight.detach(), module.block), requires_grad=False)


def packed_weights(model: nn.Module) -> dict[str, int]:
    """The names of packed weights, each with its block."""
    layers = ((name, one) for name, one in model.named_modules() if isinstance(one, FrozenLinear))
    return {f"{name}.weight": one.block for name, one in layers if one.weight.dtype is torch.uint8}


def as_numbers(weight: Tensor, block: int, *, has_values: bool) -> Tensor:
    """A packed weight as numbers in float32, divided over ranks as it is; without values, on the device `meta`."""
    local = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
    inputs = weight.shape[1] // packed_bytes(block, block) * block
    empty = torch.empty(len(local), inputs, device="meta")
    numbers = unpacked(local, block, torch.float32) if has_values else empty
    return divided_like(weight, numbers) if isinstance(weight, DTensor) else numbers


def divided_like(weight: DTensor, local: Tensor) -> DTensor:
    """A tensor with rows of another length that is divided over ranks like a weight, from this rank's rows."""
    shape = torch.Size((weight.shape[0], local.shape[1]))
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=(local.shape[1], 1)
    )
