"""Causal language models as this package uses them: packed tokens in, log-probabilities or logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.models.attention import Attention
from leaderless.models.decoder import Decoder, load_decoder
from leaderless.models.scoring import Entropy, logits_of, score_tokens


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of the tokens that were sampled.

    Attributes:
        log_probs: [R] float32, with gradient.
        entropies: [R] float32, of the distribution that each token was drawn from, with gradient where asked for; [0]
            where not asked for.
    """

    log_probs: Tensor
    entropies: Tensor


class CausalLM(Decoder):
    """A language model of `transformers` over packed sequences."""

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
        """Logits at some tokens, or the log-probabilities of what follows them.

        Args:
            tokens: [T] int64, sequences one behind the other.
            positions: [T] int64, place of each token in its sequence.
            attention: How they attend.
            select: [R] int64, tokens at which logits are wanted.
            targets: [R] int64, the token that follows each of them.
            temperature: Logits are divided by it before probabilities are taken.
            entropy: Whether entropies are wanted too, and with a gradient.

        Returns:
            `TokenOutputs` where there are targets, else [R, vocabulary] float32 logits.
        """
        hidden = self.hidden_states(tokens, positions, attention, select)
        head = cast("nn.Linear", self.model.get_output_embeddings())
        if targets is None:
            return logits_of(hidden, head.weight, head.bias)
        return TokenOutputs(*score_tokens(hidden, head, targets, temperature, entropy))


def load_causal_lm(config: ModelConfig, role: str) -> CausalLM:
    """Load a model's weights in float32 into host memory.

    Args:
        config: Where it is.
        role: That it plays, for errors.

    Raises:
        RecipeError: It cannot be found or read, weights are missing, or it does something in its attention or logits
            that this package does not do.
    """
    return CausalLM(load_decoder(AutoModelForCausalLM, config, role))
