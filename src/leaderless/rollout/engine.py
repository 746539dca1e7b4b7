"""What generates, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from leaderless.config.rollout import SamplingConfig
from leaderless.training.engine import TrainEngine

FinishReason = Literal["stop", "length", "aborted"]
"""A response ended with an end token or a stop text, was cut at its longest allowed length, or was given up."""


@dataclass
class Completion:
    """A response as it was sampled.

    Attributes:
        tokens: Token ids, the one that ended it included.
        log_probs: Of each token, under the distribution that it was drawn from; for greedy decoding, under the model.
        finish_reason: Why it ended; None while it has not.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def is_truncated(self) -> bool:
        """It was cut at its longest allowed length."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Request:
    """A prompt, and the responses that are wanted for it.

    Attributes:
        prompt: Token ids, at least one.
        sample_ids: One for each response; together with the seed they fix what the native engine samples.
        begun: What each response has already, where aborted ones are resumed; empty where all are to begin.
    """

    prompt: Sequence[int]
    sample_ids: Sequence[int]
    begun: Sequence[Completion] = ()

    def __post_init__(self) -> None:
        if not self.prompt or not self.sample_ids:
            raise ValueError("a request needs a prompt of at least one token, and at least one sample id")
        if self.begun and len(self.begun) != len(self.sample_ids):
            raise ValueError(f"a request for {len(self.sample_ids)} responses brings {len(self.begun)} that have begun")
        for completion in self.begun:
            if completion.finish_reason in {"stop", "length"}:
                raise ValueError(f"a response that ended with '{completion.finish_reason}' cannot be resumed")

    def begin(self) -> list[Completion]:
        """The responses as they are before anything is sampled."""
        if not self.begun:
            return [Completion() for _ in self.sample_ids]
        return [Completion(list(begun.tokens), list(begun.log_probs)) for begun in self.begun]


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


class Delta(NamedTuple):
    """What a step has added to one response.

    Attributes:
        request: What `submit` returned for it.
        sibling: Which of the request's responses.
        tokens: New token ids.
        log_probs: Of each of them; see `Completion`.
        finish_reason: Why the response has ended with them; None where it goes on.
    """

    request: int
    sibling: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason | None


class RolloutEngine(Protocol):
    """Generates responses, step by step, with the weights of one policy version."""

    def serving(self, trainer: TrainEngine) -> AbstractContextManager[None]:
        """Have the trainer's present weights, as long as the context lasts. All ranks of the trainer call it together.

        Args:
            trainer: Whose weights generate.

        Raises:
            RuntimeError: The engine does not have these weights after they were loaded.
        """

    def submit(self, request: Request, params: SamplingParams) -> int:
        """Ask for responses.

        Args:
            request: A prompt with at least one response.
            params: How to sample.

        Returns:
            A number by which the request is known.
        """

    def step(self) -> list[Delta]:
        """Go on until some responses have got tokens or have ended; nothing when none is under way."""

    def abort(self, request: int) -> None:
        """Give up the responses of a request that have not ended; a step will say so. Without effect if all have.

        Args:
            request: What `submit` returned.
        """

    def close(self) -> None:
        """Let go of memory and helpers."""


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    progress: Callable[[int], None] | None = None,
) -> list[list[Completion]]:
    """Sample responses to the end.

    Args:
        engine: With the weights that are meant.
        requests: Prompts, each with at least one response.
        params: How to sample.
        progress: Told the number of responses that have ended since the last time; often, also when none have, as a
            sign that the engine is at work.

    Returns:
        For each request its responses, in the order of its sample ids.
    """
    results = {engine.submit(request, params): request.begin() for request in requests}
    num_left = sum(map(len, results.values()))
    try:
        while num_left:
            num_ended = 0
            for request, sibling, tokens, log_probs, finish_reason in engine.step():
                completion = results[request][sibling]
                completion.tokens += tokens
                completion.log_probs += log_probs
                completion.finish_reason = finish_reason
                num_ended += finish_reason is not None
            num_left -= num_ended
            if progress is not None:
                progress(num_ended)
    except BaseException:
        for request in results:
            engine.abort(request)
        raise
    return list(results.values())
