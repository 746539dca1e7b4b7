"""What generates, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leaderless.config.rollout import SamplingConfig


@dataclass(frozen=True)
class Request:
    """A prompt, and the responses that are wanted for it.

    Attributes:
        prompt: Token ids, at least one.
        sample_ids: One for each response; together with the seed they fix what is sampled.
    """

    prompt: Sequence[int]
    sample_ids: Sequence[int]


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    Attributes:
        distribution: Temperature, and which tokens may be drawn.
        max_tokens: A response that reaches this length is cut.
        stop: Texts behind which a response ends.
        seed: Of the noise.
    """

    distribution: SamplingConfig
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Completion:
    """A response as it was sampled.

    Attributes:
        tokens: Token ids, the one that ended it included.
        log_probs: Of each token, under the distribution that it was drawn from; for greedy decoding, under the model.
        is_truncated: It was cut at `max_tokens`.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_truncated: bool = False


class RolloutEngine(Protocol):
    """Generates responses with the weights of one policy version."""

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample responses.

        Args:
            requests: Prompts, each with at least one response.
            params: How to sample.
            progress: Told the number of responses that have ended since the last time; often, also when none have, as a
                sign that the engine is at work.

        Returns:
            For each request its responses, in the order of its sample ids.
        """
