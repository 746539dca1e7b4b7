"""Weights that vLLM quantizes to INT8 as they arrive, which it does by itself only for experts.

Each output channel of a linear layer has its own scale. Inputs are quantized, too, each token by itself, so that the
layer multiplies integers, by vLLM's kernels for W8A8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from leaderless.config.low_precision import INT8_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.nn import Module

KEY = "int8_per_channel_static"
"""vLLM's name for weights in INT8 with a scale for each output channel."""
DONE = "_already_called_process_weights_after_loading"
"""vLLM's mark of a layer whose weights are quantized; it takes the mark away where others come."""
LARGEST = 127
"""Largest quantized weight; the range is symmetric, so -128 is left out."""


def with_int8(arguments: Mapping[str, object]) -> dict[str, object]:
    """Arguments as vLLM takes them, after it has been taught what is behind `quantization: int8_per_channel`."""
    if arguments.get("quantization") != INT8_WEIGHTS:
        return {**arguments}
    from vllm.config.quantization import QUANT_KEY_NAMES
    from vllm.model_executor.layers.quantization.online import base

    base._ONLINE_LINEAR_METHODS[QUANT_KEY_NAMES[KEY]] = _linear_method()  # noqa: SLF001
    return {**arguments, "quantization": "online", "quantization_config": {"linear": KEY, "moe": KEY}}


def quantized(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight, given the largest absolute value of each output channel.

    Args:
        weight: [outputs, inputs] weights.
        largest: [outputs, 1] largest absolute value of each output, over all ranks that divide the inputs.

    Returns:
        [outputs, inputs] int8 weights, and the [outputs, 1] float32 scales by which they are multiplied.
    """
    import torch

    scale = (largest.float() / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def _linear_method() -> type:
    """Make the class by which vLLM quantizes a linear layer and multiplies with it."""
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase, _is_tp_sharded
    from vllm.model_executor.layers.quantization.utils.quant_utils import amax_for_tp_weight_quant
    from vllm.model_executor.utils import replace_parameter
    from vllm.utils.torch_utils import set_default_torch_dtype

    class Int8OnlineLinearMethod(OnlineLinearBase):  # type: ignore[misc]
        """A linear layer with INT8 weights, of one scale for each output, and INT8 inputs, of one for each token."""

        activation_quant_key = None

        def create_weights(self, layer: Module, *sizes: object, **more: object) -> None:
            """Describe the layer as it is loaded, and choose the kernel that multiplies."""
            super().create_weights(layer, *sizes, **more)
            self.kernel = init_int8_linear_kernel(
                is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
            )

        def process_weights_after_loading(self, layer: Module) -> None:
            """Quantize what has been loaded, and have the kernel pack it."""
            if getattr(layer, DONE, False):
                return
            weight = cast("Tensor", layer.weight)
            largest = weight.abs().amax(1, keepdim=True)
            largest = amax_for_tp_weight_quant(largest, _is_tp_sharded(layer, reduces_output_dim=False))
            values, scale = quantized(weight, largest)
            replace_parameter(layer, "weight", values)
            replace_parameter(layer, "weight_scale", scale)
            self.scale = scale  # the CPU's kernel keeps its address, while vLLM copies it back to where scales were
            for name in ("input_scale", "input_zero_point", "azp_adj"):
                setattr(layer, name, None)
            with set_default_torch_dtype(self.out_dtype):  # in which the CPU's kernel writes what it has multiplied
                self.kernel.process_weights_after_loading(layer)
            setattr(layer, DONE, True)

        def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            """Multiply."""
            result: Tensor = self.kernel.apply_weights(layer, x, bias)
            return result

    return Int8OnlineLinearMethod
