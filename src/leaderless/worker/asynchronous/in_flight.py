"""Requests in flight in the engine of a rank that generates continuously: responses to prompts, and in episodes.

Both count the steps of the engine and note what happens between two of them, so that it can be done again.

    steps       1      2               3      4            of the engine
                       |               |      |
    events             2 weights 6     |      4 end 310    each with the number of steps before it
                       2 ask 310       |
                                       3 drop 311

A run that is followed does the same: what is due after as many steps happens before the next one.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, make_sample_ids
from leaderless.data.prompts.images import PromptImage, num_alike, pack_images, unpack_images
from leaderless.distributed.errors import memory_explained
from leaderless.rollout.engine import TOKENS_AT_ONCE, Completion, Delta, Request, SamplingParams, prompts_of
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.stages.context import StageContext
from leaderless.stages.rollout import TOO_MUCH, samples_of

TOKENS_PER_WAIT = 64
"""Tokens of the longest response for each token that a step may bring."""


def at_once(max_tokens: int) -> int:
    """Tokens of a response of at most some length that a step may bring.

    The place of one that has ended stays empty until the next step, which should be a small part of its time.
    """
    return max(1, min(TOKENS_AT_ONCE, max_tokens // TOKENS_PER_WAIT))


class Advance(NamedTuple):
    """Change of a group by a step of the engine.

    It has sampled the first token of one of its responses, or all of these have ended.
    """

    group: int
    has_begun: bool
    is_finished: bool


EventKind = Literal["weights", "cancel", "graded", "ask", "drop", "forget", "end"]
"""Weights of an iteration are taken, a group is canceled, or an ended one has been graded; of episodes, a response
is asked for, or not wanted any more, a conversation is forgotten, or an episode has ended."""


@dataclass
class Events:
    """Events between the steps of an engine, and, where a journal is followed, those that have to happen.

    Attributes:
        steps: Steps that the engine has taken.
        happened: Events in this line of the journal, each with the steps before it, its kind and its subject.
        facts: Further facts about some of the events, in order, which replay needs.
        expected: Events in the line that is followed; None without one.
    """

    steps: int = 0
    happened: list[list[int | str]] = field(default_factory=list)
    facts: list[Mapping[str, Json]] = field(default_factory=list)
    expected: Sequence[Sequence[int | str]] | None = None

    def note(self, kind: EventKind, about: int, facts: Mapping[str, Json] | None = None) -> None:
        """Note that something happens now."""
        self.happened.append([self.steps, kind, about])
        if facts is not None:
            self.facts.append({kind: about, **facts})

    def due(self) -> tuple[str, int] | None:
        """Event that has to happen before the next step, by the line that is followed: its kind and its subject."""
        # Events come in order, so that as many as have happened say which one is next.
        if self.expected is None or len(self.happened) >= len(self.expected):
            return None
        steps, kind, about = self.expected[len(self.happened)]
        return (str(kind), int(about)) if steps == self.steps else None

    def is_due(self, kind: EventKind) -> bool:
        """Whether the next thing that has to happen is of a kind."""
        due = self.due()
        return due is not None and due[0] == kind


@dataclass
class Tally:
    """Numbers of what has been generated since they were last reported; responses that were canceled count, too."""

    responses: int = 0
    tokens: int = 0
    voided: int = 0


@dataclass
class _Group:
    """The responses to a prompt, in the order of its distributions."""

    responses: list[Completion]
    requests: list[int]
    num_left: int


class ResponsesInFlight:
    """Responses to prompts of several iterations, each sampled on its own.

    Attributes:
        tally: Numbers of responses and tokens since it was last set.
    """

    def __init__(
        self, engine: SharedEngine, recipe: Recipe, distributions: Sequence[SamplingConfig], events: Events
    ) -> None:
        """Start with nothing in flight in a view of an engine that is awake and has weights.

        Each response to a prompt has its distribution. `events` counts the steps of the engine.
        """
        self._engine, self._recipe, self._distributions, self._events = engine, recipe, distributions, events
        self._groups: dict[int, _Group] = {}
        self._places: dict[int, tuple[int, list[int]]] = {}  # of the responses of a request, in their group
        self.tally = Tally()

    @property
    def is_busy(self) -> bool:
        """Whether a response is in flight."""
        return bool(self._places)

    def begin(self, prompts: Batch) -> None:
        """Begin the groups of some prompts."""
        rollout, siblings, seed = self._recipe.rollout, len(self._distributions), self._recipe.seed
        longest = rollout.max_response_tokens
        for row, (group, (prompt, images)) in enumerate(zip(prompts.ids.tolist(), prompts_of(prompts), strict=True)):
            one = self._groups[group] = _Group([Completion() for _ in range(siblings)], [], siblings)
            group_ids = prompts.ids[row].expand(siblings)
            ids = make_sample_ids(group_ids, prompts.ids.new_tensor(range(siblings))).tolist()
            # A request has one distribution: siblings that are drawn otherwise, such as a greedy one, need another
            # request.
            for distribution in dict.fromkeys(self._distributions):
                places = [place for place, wanted in enumerate(self._distributions) if wanted == distribution]
                params = SamplingParams(distribution, longest, rollout.stop, seed, at_once(longest))
                with memory_explained(TOO_MUCH):
                    request = Request(prompt, [ids[place] for place in places], images=images)
                    number = self._engine.submit(request, params)
                one.requests.append(number)
                self._places[number] = group, places

    def step(self) -> list[Advance]:
        """Let the engine take a step."""
        # Before the step: what it brings happens behind it.
        self._events.steps += 1
        with memory_explained(TOO_MUCH):
            return self._advance(self._engine.step())

    def collect(self) -> list[Advance]:
        """Take what an evaluation's steps have brought, before the engine gets other weights."""
        return self._advance(self._engine.collect())

    def _advance(self, deltas: Sequence[Delta]) -> list[Advance]:
        advances: list[Advance] = []
        for delta in deltas:
            if delta.request not in self._places:
                continue  # canceled
            number, places = self._places[delta.request]
            group = self._groups[number]
            response = group.responses[places[delta.sibling]]
            # Before the tokens are added, as it asks for the first ones.
            has_begun = not response.tokens and bool(delta.tokens)
            response.add(delta)
            if delta.finish_reason is not None:
                group.num_left -= 1
                self.tally.responses += 1
                self.tally.tokens += len(response.tokens)
            is_finished = group.num_left == 0
            # Only its requests: the responses stay until they are handed over.
            if is_finished:
                self._forget(group)
            if has_begun or is_finished:
                advances.append(Advance(number, has_begun, is_finished))
        return advances

    def cancel(self, number: int) -> None:
        """Abort what is left of a group, and forget all of it."""
        group = self._groups.pop(number)
        for request in group.requests:
            if request in self._places:
                self._engine.abort(request)
        self._forget(group)
        # Responses that have ended were counted when they did.
        self.tally.responses += group.num_left
        self.tally.tokens += sum(len(one.tokens) for one in group.responses if one.finish_reason is None)
        self.tally.voided += sum(len(one.tokens) for one in group.responses)

    def responses_of(self, group: int) -> Sequence[Completion]:
        """The responses of a group that is finished, and not handed over."""
        return self._groups[group].responses

    def samples(self, prompts: Batch, context: StageContext, seconds: float) -> Batch:
        """Hand over the groups of some prompts, which are finished, as samples that took some seconds."""
        responses = [response for group in prompts.ids.tolist() for response in self._groups.pop(group).responses]
        return samples_of(responses, prompts, context, self._distributions, seconds)

    def reset(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._places.clear()
        # An engine that sleeps drops all requests.
        self._engine.sleep(keep_weights=True)

    def close(self) -> None:
        """Release nothing: the engine forgets what is in flight when it is closed."""

    def _forget(self, group: _Group) -> None:
        for request in group.requests:
            self._places.pop(request, None)


@dataclass
class EngineWork:
    """Work of the engine for episodes since the last share; see `Work`."""

    busy_s: float = 0.0
    known_tokens: int = 0
    cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(eq=False)
class PendingRequest:
    """A response that an episode asks for; one that is canceled may ask for the same when it is begun again.

    Attributes:
        request: Request with one response.
        params: Distribution and limits.
        known_tokens: Tokens at the beginning of the prompt that were read or sampled before in the conversation.
        deliver: Function that gets the response.
        completion: Tokens sampled so far.
    """

    request: Request
    params: SamplingParams
    known_tokens: int
    deliver: Callable[[Completion], None]
    completion: Completion = field(default_factory=Completion)


class EngineRequests:
    """Requests of episodes to an engine, noted so that they can be made again.

    Attributes:
        events: Record of events between the steps of the engine.
        work: Work of the engine since the last share.
    """

    def __init__(self, engine: SharedEngine, events: Events, distributions: Sequence[SamplingConfig]) -> None:
        self._engine, self.events, self._distributions = engine, events, distributions
        self._pending: dict[int, PendingRequest] = {}  # by the number of the request
        self._contexts: dict[int, list[int]] = {}  # of each conversation, what it was last
        self._seen: dict[int, Sequence[PromptImage]] = {}  # the images in it
        self.work = EngineWork()

    @property
    def is_busy(self) -> bool:
        """Whether a response is in flight."""
        return bool(self._pending)

    def ask(self, pending: PendingRequest) -> None:
        """Ask for a response. Of its prompt, only what its conversation did not have before is noted."""
        # Each turn repeats the conversation: with all of it the journal would grow with the square of its length.
        request, params = pending.request, pending.params
        before, seen = self._before(request.conversation)
        pairs = enumerate(zip(before, request.prompt, strict=False))
        num_same = next((place for place, (a, b) in pairs if a != b), min(len(before), len(request.prompt)))
        kept = num_alike(seen, request.images, num_same)
        facts: dict[str, Json] = {
            "conversation": request.conversation,
            "kept": kept,
            "tokens": [*request.prompt[kept:]],
            "known": pending.known_tokens,
            "distribution": self._distributions.index(params.distribution),
            "max_tokens": params.max_tokens,
            "stop": [*params.stop],
        }
        if news := [image for image in request.images if image.place >= kept]:
            facts["images"] = base64.b64encode(pack_images(news)).decode()
        self.events.note("ask", request.sample_ids[0], facts)
        # Now, and again with the response: if that is dropped, the prompt is what the conversation was last.
        self._keep(pending)
        self._pending[self._engine.submit(request, params)] = pending
        self.work.known_tokens += pending.known_tokens

    def noted(
        self, sample_id: int, facts: Mapping[str, Json], seed: int, deliver: Callable[[Completion], None]
    ) -> PendingRequest:
        """A request of a run that is followed, from what was noted of it."""
        numbers = cast("Mapping[str, int]", facts)
        conversation = cast("int | None", facts["conversation"])
        before, seen = self._before(conversation)
        images = [image for image in seen if image.place < numbers["kept"]]
        images += unpack_images(base64.b64decode(str(facts.get("images", ""))))
        prompt = [*before[: numbers["kept"]], *cast("list[int]", facts["tokens"])]
        distribution, stop = self._distributions[numbers["distribution"]], tuple(cast("list[str]", facts["stop"]))
        params = SamplingParams(distribution, numbers["max_tokens"], stop, seed)
        request = Request(prompt, [sample_id], conversation=conversation, images=tuple(images))
        return PendingRequest(request, params, numbers["known"], deliver)

    def drop(self, pending: PendingRequest) -> int:
        """Abort a response that nobody wants any more; returns the number of tokens that are lost."""
        # Not by its sample: a canceled group that has begun again may have asked for the same.
        number = next((number for number, one in self._pending.items() if one is pending), None)
        if number is None:
            return 0  # it has ended
        self.events.note("drop", pending.request.sample_ids[0])
        del self._pending[number]
        self._engine.abort(number)
        return len(pending.completion.tokens)

    def oldest(self, sample_id: int) -> PendingRequest:
        """Oldest request for a response that is in flight."""
        return next(pending for pending in self._pending.values() if pending.request.sample_ids[0] == sample_id)

    def forget(self, conversation: int) -> None:
        """Let the engine release what it keeps of a conversation."""
        self.events.note("forget", conversation)
        self._contexts.pop(conversation, None)
        self._seen.pop(conversation, None)
        self._engine.forget(conversation)

    def step(self) -> None:
        """Let the engine take a step, and deliver what has ended."""
        self.events.steps += 1
        begin = time.perf_counter()
        deltas = self._engine.step()
        self.work.busy_s += time.perf_counter() - begin
        self._deliver(deltas)

    def collect(self) -> None:
        """Deliver what an evaluation's steps have brought."""
        self._deliver(self._engine.collect())

    def reset(self) -> None:
        """Forget everything."""
        self._pending.clear()
        self._contexts.clear()
        self._seen.clear()
        self._engine.sleep(keep_weights=True)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.request not in self._pending:
                continue  # dropped
            pending = self._pending[delta.request]
            pending.completion.add(delta)
            self.work.num_drafted += delta.num_drafted
            self.work.num_accepted += delta.num_accepted
            self.work.cached_tokens += min(delta.cached_tokens, pending.known_tokens)
            if delta.finish_reason is not None:
                del self._pending[delta.request]
                # Before it is delivered: the next request of the conversation is noted by what it was last.
                self._keep(pending)
                pending.deliver(pending.completion)

    def _keep(self, pending: PendingRequest) -> None:
        if pending.request.conversation is not None:
            self._contexts[pending.request.conversation] = [*pending.request.prompt, *pending.completion.tokens]
            self._seen[pending.request.conversation] = pending.request.images

    def _before(self, conversation: int | None) -> tuple[list[int], Sequence[PromptImage]]:
        if conversation is None:
            return [], ()
        return self._contexts.get(conversation, []), self._seen.get(conversation, ())
