"""Causal language models for packed tokens, with log-probabilities or logits as results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.models.attention import Attention
from leaderless.models.decoder import Decoder, load_decoder
from leaderless.models.products import linear_in_float32
from leaderless.models.scoring import Entropy, score_tokens


@dataclass(frozen=True)
class TokenOutputs:
    """Scores of the tokens that were sampled.

    Attributes:
        log_probs: [R] float32, with gradient.
        entropies: [R] float32, entropies of the distributions the tokens were drawn from, with gradient on request; [0]
            without a request.
    """

    log_probs: Tensor
    entropies: Tensor


class CausalLM(Decoder):
    """A language model of `transformers` for packed sequences."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        entropy: Entropy = "value",
    ) -> Tensor | TokenOutputs:
        """Compute logits at selected tokens, or log-probabilities of the tokens that follow them.

        Args:
            tokens: [T] int64, sequences one after the other.
            positions: [T] int64, place of each token in its sequence.
            attention: Attention of the pass.
            select: [R] int64, indices of the selected tokens.
            targets: [R] int64, the token that follows each of them.
            temperature: Divisor of the logits.
            entropy: Whether entropies are computed too, and with a gradient.

        Returns:
            `TokenOutputs` if there are targets, else [R, vocabulary] float32 logits.
        """
        hidden = self.hidden_states(tokens, positions, attention, select)
        head = cast("nn.Linear", self.model.get_output_embeddings())
        if targets is None:
            return linear_in_float32(hidden, head.weight, head.bias)
        return TokenOutputs(*score_tokens(hidden, head, targets, temperature, entropy))


def load_causal_lm(config: ModelConfig, role: str) -> CausalLM:
    """Load a model's weights in float32 into host memory.

    Args:
        config: Model to load.
        role: Role of the model, for errors.

    Raises:
        RecipeError: The model cannot be found or read, weights are missing, or its attention or logits need something
            that this package does not support.
    """
    return CausalLM(load_decoder(AutoModelForCausalLM, config, role))
