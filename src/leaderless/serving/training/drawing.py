"""How a request for samples is carried out."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from leaderless.config.rollout import SamplingConfig
from leaderless.rollout.engine import SamplingParams
from leaderless.serving.http_server import ApiError
from leaderless.serving.training.adapters import AdaptedModel
from leaderless.serving.training.requests import SampleRequest


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn.

    Attributes:
        sample_ids: A number for each sample, from which its noise follows.
        params: Distribution of tokens, and the longest sample.
        ends: Tokens that end a sample.
        scores_prompt: Whether tokens of the prompt get log-probabilities.
        num_scored: Number of tokens at the prompt's end that get them; None for all but the first token.
    """

    sample_ids: Sequence[int]
    params: SamplingParams
    ends: frozenset[int]
    scores_prompt: bool
    num_scored: int | None


def drawing_of(request: SampleRequest, prompt: Sequence[int], model: AdaptedModel) -> Drawing:
    """How samples are drawn for a request.

    Raises:
        ApiError: The model cannot do it.
    """
    given, room, last = request.sampling_params, model.max_context, request.prompt_logprobs_last_n
    if not prompt:
        raise ApiError(400, "prompt is empty: give at least one token", "prompt")
    if min(prompt) < 0 or max(prompt) >= model.vocabulary:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise ApiError(400, f"prompt has token {wrong}, but the model knows 0 to {model.vocabulary - 1}", "prompt")
    max_tokens = room - len(prompt) if given.max_tokens is None else given.max_tokens
    if max_tokens < 1 or len(prompt) + max_tokens > room:
        raise ApiError(
            400,
            f"a prompt of {len(prompt)} tokens and max_tokens={max_tokens} are more than the {room} that this server "
            "takes: shorten them",
            "sampling_params.max_tokens",
        )
    if last is not None and not (request.prompt_logprobs and last < len(prompt)):
        raise ApiError(
            400,
            f"prompt_logprobs_last_n={last} needs prompt_logprobs, and must be less than the prompt's {len(prompt)} "
            "tokens",
            "prompt_logprobs_last_n",
        )
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    texts = tuple(one for one in stop or () if isinstance(one, str) and one)
    tokens = frozenset(one for one in stop or () if isinstance(one, int))
    distribution = SamplingConfig(temperature=given.temperature, top_p=given.top_p, top_k=max(given.top_k, 0))
    seed = secrets.randbits(63) if given.seed is None else given.seed
    first = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest(), "big")
    return Drawing(
        sample_ids=range(first, first + request.num_samples),
        params=SamplingParams(distribution, max_tokens, texts),
        ends=model.end_tokens if stop is None else tokens,
        scores_prompt=bool(request.prompt_logprobs),
        num_scored=last,
    )
