"""The operations that training must do, and the two shares that say how well it uses a GPU.

*MFU* is the share of the peak that the maker names; the *share of a large product* is that of what one product of large
matrices reaches on the very device. `docs/performance/gpu.md` says which operations count, for both of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from made import Size
from published import device_of, load


def weights_in_layers(size: Size, head_width: int | None = None) -> int:
    """Weights of the products in all layers.

    Args:
        size: Shape of the model.
        head_width: Width of each head; None where all of them together have the width of the model.
    """
    width = head_width or size.hidden // size.heads
    attention = 2 * size.hidden * width * (size.heads + size.key_heads)
    return size.layers * (attention + 3 * size.hidden * size.feed_forward)


def training_flops(size: Size, num_tokens: int, num_scored: int, num_pairs: int, head_width: int | None = None) -> int:
    """Operations that a forward and a backward pass must do.

    Args:
        size: Shape of the model.
        num_tokens: Tokens of the pass.
        num_scored: Tokens at which the head works.
        num_pairs: Pairs of a token and one to which it attends.
        head_width: Width of each head; None where all of them together have the width of the model.
    """
    heads = size.heads * head_width if head_width else size.hidden
    products = weights_in_layers(size, head_width) * num_tokens + size.hidden * size.vocabulary * num_scored
    return 6 * products + 12 * size.layers * heads * num_pairs


def peak_flops(device: str) -> float | None:
    """Operations per second that the maker of a device names for it, in bfloat16 without sparsity.

    Args:
        device: Name of the device, exactly as torch gives it.

    Returns:
        The peak; None if the device is not in the table, as a part of a GPU is not.
    """
    return next((1e12 * entry["tflops"] for entry in load()["peaks"] if device in entry["names"]), None)


class Shares(NamedTuple):
    """How well a pass of training uses a device.

    Attributes:
        mfu: Share of the peak that the maker names; None where that is unknown.
        of_large_product: Share of what a large product reaches on the device; None where that was not measured.
    """

    mfu: float | None
    of_large_product: float | None


def shares(training: Mapping[str, Any], seconds: float, speeds: Mapping[str, Any]) -> Shares:
    """Both shares of a pass.

    Args:
        training: Result of the part of `benchmarks/gpu.py` that trains.
        seconds: Time of the pass.
        speeds: Result of the part that measures a large product, which counts if its device has the same name; empty
            if there is none.
    """
    speed, device = training["model_flops"] / seconds, device_of(training)
    peak = peak_flops(device)
    product = speeds["flops"] if "flops" in speeds and device_of(speeds) == device else None
    return Shares(None if peak is None else speed / peak, None if product is None else speed / product)
