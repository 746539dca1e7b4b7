"""How the policy answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

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


EngineName = Literal["native", "vllm", "sglang"]


class ExternalConfig(Section):
    """What engines other than the native one need."""

    python: str | None = Field(default=None, min_length=1)
    """The interpreter of an environment that has the engine. Each rank starts it there as a server of its own, on this
    machine, so that its packages and this one's need not agree. Not given: vLLM runs in the ranks' own processes."""
    memory_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Part of a device's memory for the engine while it generates: its weights and its KV cache. Of host memory, the KV
    cache takes no more than `max_sequences` of the longest sequences need."""
    graphs: bool = True
    """Compile the model and capture its passes on an accelerator: tokens come faster, and the start takes longer."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds until a server has to answer for the first time."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without an answer after which a server hangs; it is then started again."""


class RolloutConfig(SamplingConfig):
    """Generation of the samples that are trained on."""

    engine: Literal["auto", "native", "vllm", "sglang"] = "auto"
    """What generates. `auto` takes vLLM where there is a CUDA device and vLLM can be imported or `external.python` is
    given, else the native engine, which runs the trainer's own module."""
    external: ExternalConfig = ExternalConfig()
    """Of vLLM and SGLang."""

    max_response_tokens: int = Field(default=512, ge=1)
    """A response that reaches this length is cut there and marked truncated."""
    stop: tuple[str, ...] = ()
    """A response ends behind the first of these texts, as it does behind the end-of-sequence token."""
    max_sequences: int = Field(default=256, ge=1)
    """Sequences that one rank decodes at the same time; bounds the KV cache."""

    @model_validator(mode="after")
    def _engine_is_given(self) -> RolloutConfig:
        if self.engine == "sglang" and self.external.python is None:
            raise ValueError("engine: sglang needs external.python, the interpreter of an environment that has SGLang")
        return self


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
