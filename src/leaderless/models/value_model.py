"""Value models: decoders with a scalar head, which predict the reward that is still to come."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from leaderless.config.models import ModelConfig
from leaderless.models.attention import Attention
from leaderless.models.decoder import Decoder, load_decoder

HEAD = ("score.weight", "score.bias")
"""What `transformers` calls the head of a token or sequence classifier."""


class ValueModel(Decoder):
    """A token classifier of `transformers` with one output, for packed sequences."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, select: Tensor) -> Tensor:
        """Compute values [R] float32 of the states that end with selected tokens; see `Decoder.hidden_states`."""
        hidden = self.hidden_states(tokens, positions, attention, select)
        values: Tensor = self._head(hidden.float())
        return values.squeeze(1).clone()  # FSDP hooks onto what is returned, and a view could lose the hook

    @property
    def _head(self) -> nn.Module:
        return cast("nn.Module", self.model.score)

    def float32_modules(self) -> list[nn.Module]:
        """See `Decoder`. In bfloat16, 1 and 1.003 are the same value."""
        return [self._head]


def load_value_model(config: ModelConfig, role: str) -> ValueModel:
    """Load a value model; see `load_decoder`.

    A language model gets a head of zeros, so that every value is 0 at first; a token or sequence classifier with one
    output, such as an exported critic or a reward model, keeps its head.

    Raises:
        RecipeError: As for a language model; or its head has several outputs, or `transformers` has no classifier of
            its family.
    """
    model = load_decoder(AutoModelForTokenClassification, config, role, scalar_head=HEAD)
    model.config.architectures = [type(model).__name__]
    return ValueModel(model)
