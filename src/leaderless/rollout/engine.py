"""The protocol of rollout engines, their requests and responses, and the proof that they use their weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from leaderless.config.low_precision import LowPrecision
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import PromptImage, unpack_images
from leaderless.distributed.weights.stream import Probe, WeightStream
from leaderless.planner.workflow.columns import IMAGES
from leaderless.rollout.shaping import PromptScores, Ranked, Shaping

FinishReason = Literal["stop", "length", "aborted"]
"""`stop` for an end token or a stop text, `length` for a response that was cut off, `aborted` for any other."""

TOKENS_AT_ONCE = 16
"""Most tokens of a response that a step may bring where nobody waits for them one by one."""


@dataclass
class Completion:
    """A response as it was sampled.

    Attributes:
        tokens: Token ids, including an end token.
        log_probs: Log-probability of each token under the distribution it was drawn from; for greedy decoding, under
            the model.
        finish_reason: Reason for its end; None before the end.
        policy_versions: Version of the weights that sampled each token; a resumed response may have several.
        experts: Experts that the engine chose for each token of the prompt and of the response but its last one, a
            byte for each layer and choice, if it was asked to record them.
        support: Tokens that could be drawn in place of each token, as bytes of int32, if the engine was asked to record
            them; empty for a token that could be any.
        num_drafted: Tokens that were drafted for it, by an engine that drafts and says so at the end of a response.
        num_accepted: Those of them that the model has accepted.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    policy_versions: list[int] = field(default_factory=list)
    experts: list[bytes] = field(default_factory=list)
    support: list[bytes] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, delta: Delta) -> None:
        """Add what a step has sampled."""
        self.tokens += delta.tokens
        self.log_probs += delta.log_probs
        if delta.tokens:
            assert delta.policy_version is not None, "each token has the version of the weights that sampled it"
            self.policy_versions += [delta.policy_version] * len(delta.tokens)
        self.experts += delta.experts
        self.support += delta.support
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        self.finish_reason = delta.finish_reason

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut off at the longest allowed length."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Request:
    """A prompt with the responses to sample.

    Attributes:
        prompt: Token ids, at least one.
        sample_ids: One number for each response; with the seed they determine what the native engine samples.
        begun: Earlier parts of the responses, if aborted ones are resumed; empty if all are new.
        images: Images of the prompt, which has tokens for their parts.
        conversation: Number of the conversation that the request continues. An engine may keep the keys and values of
            its tokens until `RolloutEngine.forget`; None if no request follows.
    """

    prompt: Sequence[int]
    sample_ids: Sequence[int]
    begun: Sequence[Completion] = ()
    conversation: int | None = None
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt or not self.sample_ids:
            raise ValueError("a request needs a prompt of at least one token, and at least one sample id")
        if self.conversation is not None and len(self.sample_ids) > 1:
            raise ValueError(f"a turn of a conversation has one response, but {len(self.sample_ids)} are asked for")
        if self.begun and len(self.begun) != len(self.sample_ids):
            raise ValueError(f"a request for {len(self.sample_ids)} responses resumes {len(self.begun)}")
        for completion in self.begun:
            if completion.finish_reason in {"stop", "length"}:
                raise ValueError(f"a response that ended with '{completion.finish_reason}' cannot be resumed")
            if not len(completion.tokens) == len(completion.log_probs) == len(completion.policy_versions):
                raise ValueError(
                    f"a response that is resumed with {len(completion.tokens)} tokens needs a log-probability and a "
                    f"policy version for each, but has {len(completion.log_probs)} and "
                    f"{len(completion.policy_versions)}"
                )

    def begin(self) -> list[Completion]:
        """Make the responses as they are before anything is sampled."""
        if not self.begun:
            return [Completion() for _ in self.sample_ids]
        begun = self.begun
        return [
            Completion([*a.tokens], [*a.log_probs], None, [*a.policy_versions], [*a.experts], [*a.support])
            for a in begun
        ]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of responses.

    Attributes:
        distribution: Temperature, and which tokens may be drawn.
        max_tokens: Length at which a response is cut.
        stop: Texts that end a response.
        seed: Seed of the noise.
        tokens_at_once: Most tokens of a response that a step may bring. An engine in another process then sends fewer
            messages; any engine may bring fewer tokens.
        shaping: Wishes of a client of a served model; None if there are none.
    """

    distribution: SamplingConfig
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0
    tokens_at_once: int = 1
    shaping: Shaping | None = None

    def limited_to(self, max_tokens: int) -> SamplingParams:
        """The same, with responses of at most some tokens."""
        return replace(self, max_tokens=min(self.max_tokens, max_tokens))


class Delta(NamedTuple):
    """The part that a step has added to one response.

    Attributes:
        request: Number that `submit` returned.
        sibling: Index of the response in the request.
        tokens: New token ids.
        log_probs: Log-probability of each new token; see `Completion`.
        finish_reason: Reason for the end of the response; None if it continues.
        policy_version: Version of the weights that sampled the new tokens; None without any.
        cached_tokens: Tokens of the prompt whose keys and values the engine still had; once for each response.
        experts: New entries of `Completion.experts`.
        support: New entries of `Completion.support`.
        num_drafted: Addition to `Completion.num_drafted`.
        num_accepted: Addition to `Completion.num_accepted`.
        likely: Likeliest tokens at the place of each new token, if a client wants them.
        prompt: Log-probabilities of the prompt, if a client wants them, before anything else of the request.
    """

    request: int
    sibling: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason | None
    policy_version: int | None = None
    cached_tokens: int = 0
    experts: Sequence[bytes] = ()
    support: Sequence[bytes] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    likely: Sequence[Ranked] = ()
    prompt: PromptScores | None = None


class RolloutEngine(Protocol):
    """Generates responses, step by step, with the weights that it was given last."""

    @property
    def policy_version(self) -> int | None:
        """Number of optimizer steps that led to its weights; None while it has none, or has lost them."""

    def wake(self, reload: Callable[[], None]) -> None:
        """Take the memory that generation needs. An engine that is awake stays so.

        Args:
            reload: Function that calls `load_weights` again with the same weights, for an engine that loses them before
                it sleeps again. Ranks that share a trainer take part, so an engine calls it only from `submit` or
                `step`.
        """

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        """Use other weights from the next token on.

        Requests stay in progress, with the tokens that they have; later ones come with the new version. An engine that
        computes ahead may have drawn one token more by then than it has reported. Nothing that begins afterwards is
        read with keys and values of earlier weights. Requests are in progress only where the engine asks for weights
        again by `reload`, or is declared to take `updates`.

        An engine that fails while it loads may start again, without weights: then its policy version is None, and it
        is called again.

        Args:
            weights: Weights to use.
            keep_cache: Whether responses in progress keep the keys and values that earlier weights have computed,
                rather than have them computed again before their next token. An engine that is declared to do only
                one of these always does it.

        Raises:
            RuntimeError: Weights are missing or damaged, or the engine does not use them after they were loaded.
        """

    def sleep(self, *, keep_weights: bool) -> None:
        """Release memory, and all requests in progress.

        Args:
            keep_weights: Whether the same weights are wanted again; an engine may release them all the same.
        """

    def submit(self, request: Request, params: SamplingParams) -> int:
        """Ask for the responses of a request; return its number."""

    def step(self) -> list[Delta]:
        """Continue until some responses have new tokens or have ended; return nothing if none is in progress."""

    def abort(self, request: int) -> None:
        """Abort the responses of a request that have not ended; a later step reports them."""

    def forget(self, conversation: int) -> None:
        """Release what is kept of a conversation, if anything is."""

    def close(self) -> None:
        """Release memory and stop helper processes."""


def prompts_of(batch: Batch) -> list[tuple[list[int], tuple[PromptImage, ...]]]:
    """List the token ids and the images of each prompt of a batch."""
    prompts = batch.jagged("prompt_tokens").to_lists()
    if IMAGES not in batch:
        return [(prompt, ()) for prompt in prompts]
    packed = batch.jagged(IMAGES).rows()
    return [(prompt, unpack_images(one.numpy().tobytes())) for prompt, one in zip(prompts, packed, strict=True)]


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Completion]]:
    """Sample responses to their ends with an engine that is awake and has weights.

    After every step `progress` gets the numbers of responses that ended and of tokens that were sampled since its last
    call, as a sign of life.
    The responses of each request are returned in the order of its sample ids.
    """
    params = replace(params, tokens_at_once=TOKENS_AT_ONCE)
    results = {engine.submit(request, params): request.begin() for request in requests}
    num_left = sum(map(len, results.values()))
    try:
        while num_left:
            num_ended = num_tokens = 0
            for delta in engine.step():
                results[delta.request][delta.sibling].add(delta)
                num_tokens += len(delta.tokens)
                num_ended += delta.finish_reason is not None
            num_left -= num_ended
            if progress is not None:
                progress(num_ended, num_tokens)
    except BaseException:
        for request in results:
            engine.abort(request)
        raise
    return list(results.values())


def has_stopped(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Check whether the last token of a response, which had not stopped before, completes a stop text.

    A stop text begins at most as many tokens earlier as it has bytes.
    """
    if not stop:
        return False
    reach = max(len(text.encode()) for text in stop)
    text = tokenizer.decode(tokens[-reach - 1 :])
    return any(ending in text for ending in stop)


def derive_seed(seed: int, sample_id: int, position: int) -> int:
    """Derive the seed of the noise of a response that has `position` tokens: 31 bits, which every engine takes."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


PROBE_TOKENS = 32
"""Length of a text whose log-probabilities show that an engine generates with the trainer's weights."""
PROBE_TOLERANCE = {"float32": 5e-4, "bfloat16": 0.5}
"""Largest mean difference of log-probabilities that rounding explains, by the type in which the engine computes. The
text is unlikely, so its log-probabilities are large and a single one may differ by more. Without the right weights,
differences are far larger."""


def probe_tolerance(compute_dtype: str, formats: Sequence[LowPrecision] = ()) -> float:
    """Largest mean difference of log-probabilities of a probe that rounding explains.

    Args:
        compute_dtype: Type of weights as they are sent.
        formats: Formats of low precision in which the engine computes; the coarsest decides.
    """
    return max([PROBE_TOLERANCE[compute_dtype], *(one.probe_tolerance for one in formats)])


def make_probe(num_tokens: int, max_tokens: int, reserved: Container[int] = ()) -> list[int]:
    """Make a text of at least two tokens, the same on every rank, that leaves one token of the context free.

    Args:
        num_tokens: Number of tokens that there are.
        max_tokens: Length of the context.
        reserved: Tokens that no text has.
    """
    length = max(2, min(PROBE_TOKENS, max_tokens - 1))
    drawn = [derive_seed(0, 0, place) % num_tokens for place in range(length)]
    return [next(one for one in (*range(token, num_tokens), *range(token)) if one not in reserved) for token in drawn]


def check_probe(name: str, found: Tensor, probe: Probe, policy_version: int, tolerance: float, remedy: str) -> None:
    """Compare an engine's log-probabilities of a probe with the trainer's.

    Args:
        name: Name of the engine, for the error.
        found: [tokens - 1] log-probabilities of the engine.
        probe: Text with the trainer's log-probabilities.
        policy_version: Version of the weights that the engine was given.
        tolerance: Largest mean difference that rounding explains.
        remedy: Advice to the user, for the error.

    Raises:
        RuntimeError: The difference is larger, or no number.
    """
    difference = float((found.cpu() - probe.log_probs.cpu()).abs().nan_to_num(nan=torch.inf).mean())
    if difference > tolerance:
        raise RuntimeError(
            f"{name} does not use the weights of policy version {policy_version} that were loaded: its "
            f"log-probabilities of {len(found)} tokens differ from the trainer's by {difference:.3g} on average, "
            f"and rounding explains {tolerance:g}; {remedy}"
        )
