"""Attention whose temperature follows from positions, as in the layers of Llama 4 without rotary embeddings.

Formula: the query at position t, from 0, is multiplied by 1 + a log(1 + floor((t + 1) / s)). Source: arXiv 2501.19399,
and `transformers`, which counts places in a pass; they are positions as long as one sequence is passed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leaderless.models.attention.form import current_pass

_FLAG = "attn_temperature_tuning"
"""Name of the setting in attention of `transformers`."""


class TunedAttention:
    """The function `forward` of attention with such a temperature, in passes and outside of them."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._forward = module.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *given: object, **named: object) -> Any:  # noqa: ANN401 - whatever the layer returns
        """Attend; in a pass, with a temperature by positions."""
        if current_pass() is None:
            return self._forward(*given, **named)
        setattr(self._module, _FLAG, False)
        try:
            return self._forward(*given, **named)
        finally:
            setattr(self._module, _FLAG, True)

    def tuned(self, query: Tensor, positions: Tensor) -> Tensor:
        """Multiply queries, [..., T, head_dim], by what follows from their [T] int64 positions."""
        steps = torch.floor((positions.float() + 1.0) / self._module.floor_scale)
        scales: Tensor = 1.0 + self._module.attn_scale * torch.log1p(steps)
        return (query * scales.unsqueeze(1)).to(query.dtype)


def tune_in_passes(model: nn.Module) -> None:
    """Have such layers of a model attend by positions in packed passes, from now on."""
    for module in model.modules():
        is_tuned = getattr(module, _FLAG, False) and not getattr(module, "use_rope", True)
        if is_tuned and not isinstance(module.forward, TunedAttention):
            module.forward = TunedAttention(module)
