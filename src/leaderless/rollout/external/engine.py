"""Engines outside of this package: proof that weights arrive, and a restart after a failure."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from leaderless.base.devices import release_memory
from leaderless.base.image_files import plain_file
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import PromptImage, collapsed
from leaderless.distributed.remote.messages import Ask, Gain
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.loading.weight_sources import SavedForm, unchanged
from leaderless.models.routers import UNKNOWN
from leaderless.rollout.engine import (
    Completion,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    check_probe,
    derive_seed,
    has_stopped,
)
from leaderless.rollout.shaping import refuse_shaping

REMEDY = "use another version of the engine, or rollout.engine: native"
"""Remedy if an engine does not use the weights that it was given."""

ENDS = frozenset({"stop", "length"})
"""Reasons for the end of a response; an engine that gives another one has failed."""


class Driver(Protocol):
    """One engine, which serves only this rank. After `EngineError` it is closed and started again."""

    def start(self) -> None:
        """Start the engine, asleep, with meaningless weights."""

    def wake(self) -> None:
        """Allocate memory, and restore weights that were kept."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Abort everything in progress and release memory, except for weights that are needed again."""

    def load(self, weights: WeightStream) -> None:
        """Abort everything in progress, and use other weights, named as in `transformers`, from now on.

        They are all of the model's, or all adapters for the weights that the engine has read from the model's folder.

        Nothing that was computed with earlier weights is used any more.
        """

    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """Compute the log-probability of each token of a text except the first, at temperature 1."""

    def submit(self, asks: Sequence[Ask]) -> None:
        """Ask for responses; each request has a different number."""

    def step(self) -> list[Gain]:
        """Continue until some responses have new tokens."""

    def abort(self, ids: Sequence[int]) -> None:
        """Abort responses; tokens that they still get are ignored."""

    def close(self) -> None:
        """Stop the engine."""


@dataclass
class _Response:
    """A response in progress; `completion` begins with the tokens with which it was resumed."""

    request: int
    sibling: int
    sample_id: int
    prompt: Sequence[int]
    completion: Completion
    params: SamplingParams
    images: tuple[PromptImage, ...] = ()
    has_begun: bool = False  # some tokens have been reported
    num_read: int = 0  # tokens whose experts have been reported since the engine was asked


class ExternalEngine:
    """`RolloutEngine` that a driver runs outside this package.

    An engine that dies, hangs or answers with an error is started again, once from one `wake` to the next: it is given
    its weights again, and responses in progress continue from the tokens that they had. A part of an engine that spans
    ranks is not, since the other parts would have to start again with it.
    """

    def __init__(
        self,
        name: str,
        driver: Driver,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        tolerance: float,
        device: torch.device,
        report: Callable[[str], None] | None,
        impossible: Collection[int] = (),
    ) -> None:
        """Start nothing before `start` or `wake`.

        The engine's log-probabilities of a probe may differ from those that come with the weights by `tolerance` on
        average. `report` shows the user that the engine is started again; without it, that is never done.
        Tokens that are `impossible` are never drawn.
        """
        self.form: SavedForm = unchanged
        """Form in which the engine is given weights."""
        self.buffers: Mapping[str, Tensor] = {}
        """What the model has besides weights, by its name in the model's files; it is sent with them."""
        self.experts_per_token = 0
        """Experts of all layers that the engine reports for each token; 0 if it reports none."""
        self.most_support = 0
        """Largest `top_k` with which it reports the tokens that could be drawn; 0 if it never does."""
        self._name, self._driver, self._device, self._report = name, driver, device, report
        self._tokenizer, self._end_tokens = tokenizer, sorted(end_tokens)
        self._tolerance, self._impossible = tolerance, sorted(impossible)
        self._is_started = self._is_awake = False
        self.policy_version: int | None = None
        self._may_restart = False
        self._reload: Callable[[], None] = lambda: None
        self._responses: dict[int, _Response] = {}
        self._deltas: list[Delta] = []
        self._num_requests = self._num_responses = 0

    def start(self) -> None:
        """Start the engine, asleep, unless that is done; an accelerator should have as much free memory as it takes.

        vLLM takes a share of all of the device's memory for a moment, whatever it needs of it.
        """
        if not self._is_started:
            release_memory(self._device)
            self._driver.start()
            self._is_started = True

    def wake(self, reload: Callable[[], None]) -> None:
        """Start the engine if it is not running, and wake it; it is started again if that fails."""
        self._reload, self._may_restart = reload, self._report is not None
        if self._is_awake:
            return
        self.start()
        release_memory(self._device)
        try:
            self._driver.wake()
        except EngineError as error:
            self._restart(error)
            self._driver.wake()
        self._is_awake = True

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        """Send weights, check the probe, and ask for the rest of each response again, so that all is computed again."""
        self.policy_version = None
        try:
            self._driver.load(weights.each(self.form).followed_by(self.buffers))
            if weights.probe is not None:
                found = torch.tensor(self._driver.prompt_log_probs(weights.probe.tokens))
                check_probe(self._name, found, weights.probe, weights.policy_version, self._tolerance, REMEDY)
            self._ask_again()
        except EngineError as error:
            self._restart(error)
            self._driver.wake()
            self._is_awake = True
        else:
            self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:
        """Forget all requests and put the engine to sleep."""
        self._forget()
        if not self._is_awake:
            return
        try:
            self._driver.sleep(keep_weights=keep_weights)
        except EngineError as error:
            self._restart(error)
        self._is_awake = False
        if not keep_weights:
            self.policy_version = None

    def _restart(self, error: EngineError) -> None:
        """Start the engine again, asleep and without weights; raise the error of a second failure."""
        self._driver.close()
        self.policy_version, self._is_started, self._is_awake = None, False, False
        if self._report is None or not self._may_restart:
            raise error
        self._may_restart = False
        self._report(f"{error}\n{self._name} is started again")
        self.start()

    def submit(self, request: Request, params: SamplingParams) -> int:
        """Send each response as a separate request; one that already has `max_tokens` ends at once."""
        refuse_shaping(params.shaping, self._name)
        self._num_requests += 1
        number, fresh = self._num_requests, []
        for sibling, (sample_id, completion) in enumerate(zip(request.sample_ids, request.begin(), strict=True)):
            if len(completion.tokens) >= params.max_tokens:
                self._deltas.append(Delta(number, sibling, (), (), "length"))
                continue
            self._num_responses += 1
            fresh.append(self._num_responses)
            response = _Response(number, sibling, sample_id, list(request.prompt), completion, params, request.images)
            self._responses[self._num_responses] = response
        try:
            self._driver.submit([self._ask(number) for number in fresh])
        except EngineError as error:
            self._recover(error)
        return number

    def _ask(self, number: int) -> Ask:
        """Ask for the rest of a response."""
        response = self._responses[number]
        params, begun = response.params, response.completion.tokens
        is_sampled = params.distribution.temperature > 0
        return Ask(
            id=number,
            prompt=[*collapsed(response.prompt, response.images), *begun],
            max_tokens=params.max_tokens - len(begun),
            temperature=params.distribution.temperature,
            top_p=params.distribution.top_p,
            top_k=params.distribution.top_k,
            min_p=params.distribution.min_p,
            seed=derive_seed(params.seed, response.sample_id, len(begun)),
            end_tokens=self._end_tokens,
            images=[base64.b64encode(plain_file(image.data)).decode() for image in response.images],
            num_tokens=len(response.prompt) + len(begun),
            impossible=self._impossible,
            tokens_at_once=1 if params.stop else params.tokens_at_once,  # what follows a stop text is in vain
            records_support=is_sampled and 0 < params.distribution.top_k <= self.most_support,
        )

    def step(self) -> list[Delta]:
        """Report what the engine has sampled; if it fails, it is started again."""
        while self._responses and not self._deltas:
            try:
                for gain in self._driver.step():
                    self._take(gain)
            except EngineError as error:
                self._recover(error)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _recover(self, error: EngineError) -> None:
        """Start the engine again with the same weights, with which all responses in progress are asked for again."""
        self._restart(error)
        self._driver.wake()
        self._is_awake = True
        self._reload()

    def _ask_again(self) -> None:
        """Ask for the rest of all responses in progress, under other numbers than before."""
        first = self._num_responses + 1
        self._responses = dict(enumerate(self._responses.values(), first))
        self._num_responses += len(self._responses)
        for response in self._responses.values():
            response.num_read = 0
        if self._responses:
            self._driver.submit([self._ask(number) for number in self._responses])

    def _take(self, gain: Gain) -> None:
        """Add tokens to a response, up to one that completes a stop text."""
        response = self._responses.get(gain.id)
        if response is None:
            return  # it has been aborted or has stopped in the meantime
        if gain.policy_version != self.policy_version:
            raise RuntimeError(
                f"{self._name} has sampled with weights of policy version {gain.policy_version}, but version "
                f"{self.policy_version} was loaded: another program has changed its weights"
            )
        if gain.finish_reason is not None and gain.finish_reason not in ENDS:
            raise EngineError(f"the engine has aborted a response by itself: finish reason '{gain.finish_reason}'")
        completion, reason = response.completion, cast("FinishReason | None", gain.finish_reason)
        cached, response.has_begun = 0 if response.has_begun else gain.cached_tokens, True
        begin = len(completion.tokens)
        for token, log_prob in zip(gain.tokens, gain.log_probs, strict=True):
            completion.tokens.append(token)
            completion.log_probs.append(log_prob)
            if has_stopped(completion.tokens, response.params.stop, self._tokenizer):
                reason = "stop"
                break
        if reason is not None:
            del self._responses[gain.id]
            if gain.finish_reason is None:
                self._abort([gain.id])
        tokens, log_probs = completion.tokens[begin:], completion.log_probs[begin:]
        support = [base64.b64decode(one) for one in gain.support[: len(tokens)]] or [b""] * (
            len(tokens) * bool(self.most_support)
        )
        completion.support += support
        drafted, accepted = gain.drafts or (0, 0)
        news = self._take_experts(response, gain, has_ended=reason is not None) if self.experts_per_token else ()
        self._deltas.append(
            Delta(
                response.request,
                response.sibling,
                tokens,
                log_probs,
                reason,
                gain.policy_version,
                cached,
                news,
                support,
                drafted,
                accepted,
            )
        )

    def _take_experts(self, response: _Response, gain: Gain, *, has_ended: bool) -> Sequence[bytes]:
        """Add the experts of tokens that have been read, and return those that are new.

        Tokens with which a response was resumed are read again, and keep the experts that sampled them. An engine may
        report experts at the end of a response alone; it then knows none of one that is cut at a stop text.
        """
        completion = response.completion
        num_read, response.num_read = response.num_read, response.num_read + len(gain.experts)
        num_wanted = len(response.prompt) + len(completion.tokens) - 1 - len(completion.experts)
        found = gain.experts[max(len(completion.experts) - num_read, 0) :][:num_wanted]
        news = [base64.b64decode(one) for one in found]
        if has_ended and len(news) < num_wanted:
            if gain.finish_reason is not None:
                raise RuntimeError(
                    f"{self._name} has reported the experts of {len(completion.experts) + len(news)} of "
                    f"{len(completion.experts) + num_wanted} tokens that it has read for a response: {REMEDY}, or "
                    "leave out algorithm.replay_experts"
                )
            news += [bytes([UNKNOWN]) * self.experts_per_token] * (num_wanted - len(news))
        completion.experts += news
        return news

    def abort(self, request: int) -> None:
        """Report responses as aborted at once; an engine that fails meanwhile is left to the next step."""
        ids = [number for number, response in self._responses.items() if response.request == request]
        self._deltas += [Delta(request, self._responses.pop(number).sibling, (), (), "aborted") for number in ids]
        self._abort(ids)

    def _abort(self, ids: Sequence[int]) -> None:
        if ids and self._is_started:
            with suppress(EngineError):  # the next step will fail too, and these responses are not asked for again
                self._driver.abort(ids)

    def _forget(self) -> None:
        self._responses.clear()
        self._deltas.clear()

    def forget(self, conversation: int) -> None:
        """Do nothing: the engine decides by itself what it keeps."""

    def close(self) -> None:
        """Stop the engine."""
        self._forget()
        self._driver.close()
        self.policy_version, self._is_started, self._is_awake = None, False, False
