"""Changes that some families make to logits after the head: a factor, and a soft cap."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig

_MULTIPLYING = ("hyperclovax",)
"""Types of models that multiply logits by `logits_scaling`; all others divide them, or hidden states, by it."""
NEVER = -1e8
"""A logit of the head below it belongs to a word that is never drawn, which no cap may make possible."""


class LogitForm(NamedTuple):
    """Form of a model's logits: softcap * tanh(scale * z / softcap) of the head's logits z, or scale * z without a cap.

    Attributes:
        scale: Factor of the head's logits, above 0.
        softcap: Bound of the size of logits, above 0; None for none.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, described: PreTrainedConfig) -> LogitForm:
        """The form by the description of a model, or of its part that reads text.

        Raises:
            ValueError: A setting is not above 0.
        """
        config = described.get_text_config()
        softcap, scale, divisor = (
            _positive(config, name) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        )
        whole = 1.0 if scale is None else scale
        if divisor is not None:
            whole = whole * divisor if config.model_type in _MULTIPLYING else whole / divisor
        return cls(whole, softcap)

    @property
    def steepness(self) -> float | None:
        """Factor of the head's logits in the hyperbolic tangent; None without a cap."""
        return None if self.softcap is None else self.scale / self.softcap

    @property
    def height(self) -> float:
        """Factor of the hyperbolic tangent, or, without a cap, of the head's logits."""
        return self.scale if self.softcap is None else self.softcap

    def apply(self, logits: Tensor) -> Tensor:
        """Compute the model's logits from logits of the head, which may be overwritten, without a gradient."""
        if self.steepness is not None:
            logits = squashed(logits, self.steepness)
        return logits if self.height == 1 else logits.mul_(self.height)


def squashed(logits: Tensor, steepness: float) -> Tensor:
    """Compute tanh(steepness * z) of logits z; words that are never drawn stay so."""
    return (logits * steepness).tanh_().masked_fill_(logits < NEVER, NEVER)


def damping(squash: Tensor, steepness: float) -> Tensor:
    """Compute the derivative of what `squashed` gives: steepness * (1 - tanh^2), and 0 for what is never drawn."""
    return squash.square().neg_().add_(1).clamp_(min=0).mul_(steepness)


def _positive(config: PreTrainedConfig, name: str) -> float | None:
    """A setting of a model; None if it has none."""
    value = getattr(config, name, None)
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} is not supported, only numbers above 0")
    return float(value)
