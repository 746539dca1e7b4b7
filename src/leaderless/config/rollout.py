"""How the policy answers."""

from __future__ import annotations

from pydantic import Field

from leaderless.config.base import Section
from leaderless.config.batch import MAX_RESPONSES


class SamplingConfig(Section):
    """The distribution that the next token is drawn from."""

    temperature: float = Field(default=1.0, ge=0)
    """Logits are divided by it; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep tokens at least this fraction as likely as the most likely one; 0 keeps all."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens of the model's distribution can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RolloutConfig(SamplingConfig):
    """Generation of the samples that are trained on."""

    max_response_tokens: int = Field(default=512, ge=1)
    """A response that reaches this length is cut there and marked truncated."""
    stop: tuple[str, ...] = ()
    """A response ends behind the first of these texts, as it does behind the end-of-sequence token."""
    max_sequences: int = Field(default=256, ge=1)
    """Sequences that one rank decodes at the same time; bounds the KV cache."""


class EvaluationConfig(SamplingConfig):
    """Accuracy on held-out prompts, during training and by `leaderless eval`."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps, before the first and after the last; 0 never does."""
    responses_per_prompt: int = Field(default=1, ge=1, le=MAX_RESPONSES)
    """Responses sampled for each prompt: the k of mean@k, pass@k and maj@k."""
    temperature: float = Field(default=0.0, ge=0)
    """Logits are divided by it; 0 takes the most likely token."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Use only this many held-out rows, from the first."""
    metric: str | None = None
    """The reward that decides whether a response is correct; the one of largest weight when not given."""
    correct_at: float = 1.0
    """A response is correct when that reward, before weighting, is at least this."""
