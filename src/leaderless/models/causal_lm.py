"""Causal language models for packed tokens, with log-probabilities or logits as results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.models.attention import Attention
from leaderless.models.decoder import Decoder, empty_decoder, load_decoder
from leaderless.models.products import linear_in_float32
from leaderless.models.scoring import Entropy, score_tokens
from leaderless.models.sums import copied


@dataclass(frozen=True)
class TokenOutputs:
    """Scores of the tokens that were sampled.

    Attributes:
        log_probs: [R] float32, with gradient.
        entropies: [R] float32, entropies of the distributions from which the tokens were drawn, with gradient on
            request; [0] if they were not requested.
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
        temperature: float | Tensor = 1.0,
        entropy: Entropy = "value",
    ) -> Tensor | TokenOutputs:
        """Compute logits [R, vocabulary] float32 at selected tokens, or scores of the targets, [R] int64, that follow.

        The first arguments are those of `Decoder.hidden_states`; the temperature, one for all or [R], divides the
        logits.
        """
        hidden = self.hidden_states(tokens, positions, attention, select)
        head = cast("nn.Linear", self.model.get_output_embeddings())
        part = self.vocabulary_part
        if targets is None:
            assert part is None, "engines that generate have all words"
            return linear_in_float32(hidden, head.weight, head.bias)
        if part is not None:
            hidden = copied(hidden, part.peers)
        return TokenOutputs(*score_tokens(hidden, head, targets, temperature, entropy, part))


def load_causal_lm(config: ModelConfig, role: str) -> CausalLM:
    """Load a language model; see `load_decoder`."""
    return CausalLM(load_decoder(AutoModelForCausalLM, config, role))


def empty_causal_lm(config: ModelConfig, role: str) -> CausalLM:
    """Make a language model whose weights have only names and shapes; see `empty_decoder`."""
    return CausalLM(empty_decoder(AutoModelForCausalLM, config, role))
