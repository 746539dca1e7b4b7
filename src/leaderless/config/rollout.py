"""Batch sizes, and generation of responses in training and evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from leaderless.base.named_functions import is_function_name
from leaderless.base.section import Section
from leaderless.config.low_precision import LowPrecision, formats_of, num_drafts

MAX_RESPONSES = 1 << 16
"""Largest number of siblings in the id of a sample."""
FIRST_MICRO_BATCH_TOKENS = 16384
"""First bound of `micro_batch_tokens: auto` if memory is large, unless a sample may be longer."""


class BatchConfig(Section):
    """Batch sizes; all other sizes are derived from these and shown by `leaderless plan`."""

    prompts_per_step: int = Field(default=128, ge=1)
    """Prompts (for supervised fine-tuning: rows) per step, over all ranks."""
    responses_per_prompt: int = Field(default=8, ge=1, le=MAX_RESPONSES)
    """Responses sampled for each prompt: the group."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates made from one step's samples."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Times that each sample is used in the updates of a step, whose number has to be a multiple: with 16 updates and 4
    epochs, an update sees a quarter of the samples."""
    windows_per_step: int = Field(default=1, ge=1)
    """Number of parts in which each rank's prompts of a step pass through nodes on different ranks that need not see
    all rows at once (rollout, rewards, log-probs): while one part is sampled, the part before it is sent or already
    scored. It has no effect if no rows change ranks between such nodes."""
    micro_batch_tokens: int | Literal["auto"] = 16384
    """Largest number of tokens in one forward and backward pass of a rank, at least 1: a memory bound that changes no
    result. A prompt counts once for all of its responses in the pass. `auto` begins with 16,384, or the longest sample
    if that is longer, halves it until the plan's estimate fits into memory, and again whenever memory runs out."""

    @field_validator("micro_batch_tokens", mode="before")
    @classmethod
    def _is_bound_or_auto(cls, value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be a whole number of at least 1, or auto")

    @model_validator(mode="after")
    def _epochs_divide_updates(self) -> Self:
        if self.updates_per_step % self.epochs_per_step:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} is no multiple of epochs_per_step={self.epochs_per_step}: "
                "each epoch makes the same number of updates, so set a multiple"
            )
        return self

    @property
    def parts_per_step(self) -> int:
        """Parts into which the samples of a step are divided; each epoch makes an update with each of them."""
        return self.updates_per_step // self.epochs_per_step

    def first_micro_batch_tokens(self, longest_tokens: int) -> int:
        """The bound that a run begins with, given the length of the longest sample."""
        if self.micro_batch_tokens == "auto":
            return max(FIRST_MICRO_BATCH_TOKENS, longest_tokens)
        return self.micro_batch_tokens


class SamplingConfig(Section):
    """The distribution from which the next token is drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of most likely tokens that has at least this probability; 1 keeps all. With this, `top_k`
    or `min_p`, the engine records the tokens that could be drawn, and training normalizes over these: the native engine
    always can, vLLM if `top_k` is at most 256, SGLang cannot."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to keep; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least probability of kept tokens, as a fraction of the most likely token's; 0 keeps all."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens of the model's distribution can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def truncations(self) -> dict[str, float]:
        """Settings that leave tokens out, with their values."""
        given = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value != (1 if name == "top_p" else 0)}


class ExternalConfig(Section):
    """Settings of engines other than the native one."""

    python: str | None = Field(default=None, min_length=1)
    """Python interpreter of an environment with the engine. Each rank starts its own server there, on its machine, so
    the engine may need other packages than this environment has. By default, vLLM runs in the ranks' own processes."""
    addresses: tuple[str, ...] = ()
    """Instead of `python`: `HOST:PORT` of engines that were started elsewhere by `leaderless engine`, one for each rank
    that generates, in the order of ranks. Weights are sent there. The variable `LEADERLESS_TOKEN` has their token."""
    memory_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Share of a device's memory for the engine's weights and KV cache while it generates. On a CPU, the KV cache is at
    most what `max_sequences` of the longest sequences need."""
    graphs: bool = True
    """Compile the model and capture its passes on an accelerator: generation is faster, starting takes longer."""
    merge_adapters: bool = False
    """Send whole weights with `models.ROLE.lora` merged in, and not the adapters alone. An engine generates a little
    faster so, and can have models whose adapters it does not know; but all weights travel after each update."""
    arguments: Mapping[str, JsonValue] = {}
    """Arguments of vLLM's `EngineArgs` or of SGLang's server by name, such as `max_num_batched_tokens`; null leaves out
    one that a role has from the general settings. Before models are loaded, names are compared with those that the
    installed version has. Refused is what the recipe sets elsewhere, and what would make samples other than training
    takes them for."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds that a server may take until its first answer."""
    answer_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without an answer after which a server counts as hanging and is restarted."""

    def __hash__(self) -> int:
        """Hash without the values of arguments: they may be lists and mappings, and sections are keys of mappings."""
        return hash((self.python, self.addresses, self.memory_fraction, *sorted(self.arguments)))

    @field_validator("addresses")
    @classmethod
    def _addresses_have_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if re.fullmatch(r"[^\s/@]+:\d{1,5}", one) is None:
                raise ValueError(f"'{one}' must be HOST:PORT, where `leaderless engine` listens")
        if twice := [one for one in value if value.count(one) > 1]:
            raise ValueError(f"'{twice[0]}' is named twice: an engine serves one rank")
        return value

    @model_validator(mode="after")
    def _is_in_one_place(self) -> ExternalConfig:
        if self.addresses and self.python is not None:
            raise ValueError(
                "addresses are of engines that run already, and python starts others: leave out one of both"
            )
        return self

    @property
    def is_in_process(self) -> bool:
        """Whether the engine runs in the processes of the ranks."""
        return self.python is None and not self.addresses

    @property
    def given_arguments(self) -> dict[str, JsonValue]:
        """Arguments that are not left out."""
        return {name: value for name, value in self.arguments.items() if value is not None}


class RolloutConfig(SamplingConfig):
    """Generation of the samples that are trained on."""

    engine: str = "auto"
    """Engine that generates: `native`, `vllm`, `sglang`, or a custom one as `package.module:function`. `auto` is vLLM
    if there is a CUDA device and either vLLM can be imported or `external.python` is given; else the native engine,
    which runs this package's own modules."""
    external: ExternalConfig = ExternalConfig()
    """Settings of vLLM and SGLang."""

    weights: Literal["auto", "whole", "difference"] = "auto"
    """Form in which new weights of a language model go to ranks that only generate: `whole`, or as the `difference`
    from those before, exactly. A message has all numbers where that takes fewer bytes, and the first one after a start,
    another layout or a missed version. For differences, each rank that trains keeps its share of the last weights in
    host memory, in the engine's type, and the ranks with engines other than the native one divide a copy among them.
    `auto` sends differences between machines where weights are sent from host memory: through a channel, and on CPUs.
    It sends all numbers in float32, in which nearly all change, within a machine, and between the memories of
    accelerators, where to find what has changed may take longer than to send everything. Adapters are always sent
    whole."""
    max_response_tokens: int = Field(default=512, ge=1)
    """Length at which responses are cut and marked as truncated."""
    stop: tuple[str, ...] = ()
    """Texts after which a response ends, besides the end-of-sequence token."""
    max_sequences: int = Field(default=256, ge=1)
    """Number of sequences that one engine decodes at the same time; it bounds the KV cache. Of conversations that wait
    for their next turn it keeps what remains of this number, so for episodes set at least `environment.concurrency`,
    times the agents of an episode."""

    @field_validator("engine")
    @classmethod
    def _engine_is_named(cls, value: str) -> str:
        if not value.isidentifier() and not is_function_name(value):
            raise ValueError("must be the name of an engine, such as native, or package.module:function")
        return value

    @model_validator(mode="after")
    def _engine_is_given(self) -> RolloutConfig:
        if self.engine == "sglang" and self.external.python is None:
            raise ValueError("engine: sglang needs external.python, the interpreter of an environment that has SGLang")
        return self

    @property
    def low_precision(self) -> list[LowPrecision]:
        """Formats of low precision in which the engine computes, by its arguments."""
        return formats_of(self.engine, self.external.given_arguments)

    @property
    def num_drafts(self) -> int:
        """Tokens that the engine drafts at a time, by its arguments; 0 if it drafts none."""
        return num_drafts(self.engine, self.external.given_arguments)


class EvaluationConfig(SamplingConfig):
    """Accuracy on held-out prompts, during training and by `leaderless eval`."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; there is also one before the first and one after the last step. 0 for none."""
    role: str | None = None
    """Role that answers; by default the first one that generates in the workflow, or without any the first one that is
    trained. `leaderless eval` has an option for another one."""
    responses_per_prompt: int = Field(default=1, ge=1, le=MAX_RESPONSES)
    """Responses sampled for each prompt: the k of mean@k, pass@k and maj@k."""
    temperature: float = Field(default=0.0, ge=0)
    """Divisor of the logits; 0 takes the most likely token."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Number of held-out rows to use, from the first; all by default."""
    metric: str | None = None
    """Reward that decides whether a response is correct; by default the one of largest weight, or the
    environment's if there is none."""
    correct_at: float = 1.0
    """Value of that reward, before weighting, from which a response is correct."""
