"""Causal language models as this package uses them: packed tokens in, log-probabilities or logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.models.attention import Attention
from leaderless.models.decoder import Decoder, load_decoder

CHUNK_ELEMENTS = 1 << 25
"""Most logits that are held at a time; more are computed in pieces and recomputed in the backward pass."""


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of the tokens that were sampled.

    Attributes:
        log_probs: [R] float32, with gradient.
        entropies: [R] float32, of the distribution that each token was drawn from; with gradient where asked for.
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
        *,
        entropy_gradient: bool = False,
    ) -> Tensor | TokenOutputs:
        """Logits at some tokens, or the log-probabilities of what follows them.

        Args:
            tokens: [T] int64, sequences one behind the other.
            positions: [T] int64, place of each token in its sequence.
            attention: How they attend.
            select: [R] int64, tokens at which logits are wanted.
            targets: [R] int64, the token that follows each of them.
            temperature: Logits are divided by it before probabilities are taken.
            entropy_gradient: Entropies have a gradient too.

        Returns:
            `TokenOutputs` where there are targets, else [R, vocabulary] float32 logits.
        """
        hidden = self.hidden_states(tokens, positions, attention, select)
        if targets is None:
            return self._logits(hidden)
        rows = max(1, CHUNK_ELEMENTS // self.model.config.get_text_config().vocab_size)
        if len(targets) <= rows:
            return TokenOutputs(*self._score(hidden, targets, temperature, entropy_gradient))
        chunks = [
            checkpoint(self._score, part, target, temperature, entropy_gradient, use_reentrant=False)
            for part, target in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        ]
        log_probs, entropies = zip(*chunks, strict=True)
        return TokenOutputs(torch.cat(log_probs), torch.cat(entropies))

    def _logits(self, hidden: Tensor) -> Tensor:
        head = cast("nn.Module", self.model.get_output_embeddings())
        logits: Tensor = head(hidden).float()
        return logits

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of targets and entropies, in float32."""
        logits = self._logits(hidden) / temperature
        normalizer = logits.logsumexp(dim=-1)
        log_probs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - normalizer
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            mean_logit = ((logits - normalizer.unsqueeze(1)).exp() * logits).sum(dim=-1)
            entropies = normalizer - mean_logit
        return log_probs, entropies


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
