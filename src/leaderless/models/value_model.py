"""Value models: decoders with a scalar head, which say how much reward is still to be expected."""

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
    """A token classifier of `transformers` with one output, over packed sequences."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, select: Tensor) -> Tensor:
        """Values of the states that end with some tokens.

        Args:
            tokens: [T] int64, sequences one behind the other.
            positions: [T] int64, place of each token in its sequence.
            attention: How they attend.
            select: [R] int64, tokens behind which the value is wanted.

        Returns:
            [R] float32.
        """
        hidden = self.hidden_states(tokens, positions, attention, select)
        values: Tensor = self._head(hidden.float())
        return values.squeeze(1).clone()  # FSDP hooks onto what is returned, and a view could lose the hook

    @property
    def _head(self) -> nn.Module:
        return cast("nn.Module", self.model.score)

    def float32_modules(self) -> list[nn.Module]:
        """See `Decoder`. In bfloat16 a value of 1 could not be told from 1.003."""
        return [self._head]


def load_value_model(config: ModelConfig, role: str) -> ValueModel:
    """Load a value model's weights in float32 into host memory.

    Args:
        config: A language model, which gets a head of zeros: the same on every rank, and every value is 0 at first; or
            a token or sequence classifier with one output, such as an exported critic or a reward model.
        role: That it plays, for errors.

    Raises:
        RecipeError: As for a language model; or its head has several outputs, or `transformers` has no classifier of
            its family.
    """
    model = load_decoder(AutoModelForTokenClassification, config, role, scalar_head=HEAD)
    model.config.architectures = [type(model).__name__]
    return ValueModel(model)
