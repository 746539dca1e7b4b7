"""Causal language models as this package uses them: packed tokens in, log-probabilities or logits out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.models.attention import ATTENTION_NAME, Attention
from leaderless.models.support import check_supported

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


class CausalLM(nn.Module):
    """A decoder of `transformers` over packed sequences."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model that was loaded with this package's attention.

        Args:
            model: Its weights keep their names.
        """
        super().__init__()
        self.model = model

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
        output = self.model.base_model(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attention=attention
        )
        hidden = output.last_hidden_state.squeeze(0).index_select(0, select)
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
    key = f"models.{role}"
    try:
        with _quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                config.path,
                revision=config.revision,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:
        # Whatever a folder holds, `transformers` and what it calls have errors of every kind for it.
        raise RecipeError.at(key, f"'{config.path}' cannot be loaded: {error}") from error
    if info["mismatched_keys"]:
        name, saved, expected = sorted(info["mismatched_keys"])[0]
        sizes = f"its {name} is {tuple(saved)}, but its config.json asks for {tuple(expected)}"
        raise RecipeError.at(key, f"'{config.path}' has weights of another size than it says: {sizes}")
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RecipeError.at(key, f"'{config.path}' lacks {len(missing)} of its weights, as {missing[0]}")
    check_supported(model, key)
    _remove_dropout(model)
    if config.gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    return CausalLM(model)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """What is wrong with a model's weights is said by this package, in one line."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _remove_dropout(model: PreTrainedModel) -> None:
    """The policy that is trained shall be the one that sampled and was scored, in every pass."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """By the name that the installed version of `transformers` has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
