"""Groups under way in the engine of a rank that generates continuously."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from leaderless.config import Json, Recipe
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, make_sample_ids
from leaderless.data.errors import memory_explained
from leaderless.rollout.engine import TOKENS_AT_ONCE, Completion, Delta, Request, SamplingParams, prompts_of
from leaderless.rollout.shared import SharedEngine
from leaderless.stages.rollout import TOO_MUCH

TOKENS_PER_WAIT = 64
"""Tokens of the longest response for each token that a step may bring."""


def at_once(max_tokens: int) -> int:
    """Tokens of a response of at most some length that a step may bring.

    The place of one that has ended stays empty until the next step, which should be a small part of its time.
    """
    return max(1, min(TOKENS_AT_ONCE, max_tokens // TOKENS_PER_WAIT))


class Advance(NamedTuple):
    """What a step of the engine has done to a group.

    Attributes:
        group: Its id.
        has_begun: Whether the step has sampled the first token of one of its responses.
        is_finished: Whether all its responses have ended.
    """

    group: int
    has_begun: bool
    is_finished: bool


EventKind = Literal["weights", "cancel", "graded", "ask", "drop", "forget", "end"]
"""Weights of an iteration are taken, a group is given up, or an ended one has been graded; of episodes, a response
is asked for, or not wanted any more, a conversation is forgotten, or an episode has ended."""


@dataclass
class Events:
    """What happens between the steps of an engine, and, where a journal is followed, what has to happen.

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
        """What has to happen before the next step, by the line that is followed: its kind, and what it is about."""
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
    """What has been generated since it was last asked for.

    Attributes:
        responses: Responses that have ended, with those that were given up.
        tokens: Their tokens.
        voided: Tokens of responses that were given up.
        begin_s: Time at which counting began.
    """

    responses: int = 0
    tokens: int = 0
    voided: int = 0
    begin_s: float = field(default_factory=time.perf_counter)


@dataclass
class _Group:
    """The responses to a prompt, in the order of its distributions."""

    responses: list[Completion]
    requests: list[int]
    num_left: int


class ResponseField:
    """Responses to prompts of several iterations, each sampled on its own.

    Attributes:
        tally: Numbers of responses and tokens since it was last set.
    """

    def __init__(
        self, engine: SharedEngine, recipe: Recipe, distributions: Sequence[SamplingConfig], events: Events
    ) -> None:
        """Have nothing under way.

        Args:
            engine: View of an engine that is awake and has weights.
            recipe: The recipe, as seen by the role that samples.
            distributions: Distribution of each response to a prompt.
            events: Record of events between the steps of the engine, which it counts.
        """
        self._engine, self._recipe, self._distributions, self._events = engine, recipe, distributions, events
        self._groups: dict[int, _Group] = {}
        self._places: dict[int, tuple[int, list[int]]] = {}  # of the responses of a request, in their group
        self.tally = Tally()

    @property
    def is_busy(self) -> bool:
        """Whether a response is under way."""
        return bool(self._places)

    def begin(self, prompts: Batch) -> None:
        """Begin the groups of some prompts."""
        rollout, siblings, seed = self._recipe.rollout, len(self._distributions), self._recipe.seed
        longest = rollout.max_response_tokens
        for row, (group, (prompt, images)) in enumerate(zip(prompts.ids.tolist(), prompts_of(prompts), strict=True)):
            one = self._groups[group] = _Group([Completion() for _ in range(siblings)], [], siblings)
            group_ids = prompts.ids[row].expand(siblings)
            ids = make_sample_ids(group_ids, prompts.ids.new_tensor(range(siblings))).tolist()
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
                continue  # given up
            number, places = self._places[delta.request]
            group = self._groups[number]
            response = group.responses[places[delta.sibling]]
            has_begun = not response.tokens and bool(delta.tokens)
            response.add(delta)
            if delta.finish_reason is not None:
                group.num_left -= 1
                self.tally.responses += 1
                self.tally.tokens += len(response.tokens)
            is_finished = group.num_left == 0
            if is_finished:
                self._forget(group)
            if has_begun or is_finished:
                advances.append(Advance(number, has_begun, is_finished))
        return advances

    def give_up(self, number: int) -> None:
        """Abort what is left of a group, and forget all of it."""
        group = self._groups.pop(number)
        for request in group.requests:
            if request in self._places:
                self._engine.abort(request)
        self._forget(group)
        self.tally.responses += group.num_left
        self.tally.tokens += sum(len(one.tokens) for one in group.responses if one.finish_reason is None)
        self.tally.voided += sum(len(one.tokens) for one in group.responses)

    def responses_of(self, group: int) -> Sequence[Completion]:
        """The responses of a group that is finished, and not handed over."""
        return self._groups[group].responses

    def take(self, groups: Sequence[int]) -> list[Completion]:
        """Hand over the responses of groups that are finished, group by group."""
        return [response for group in groups for response in self._groups.pop(group).responses]

    def reset(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._places.clear()
        self._engine.sleep(keep_weights=True)

    def close(self) -> None:
        """Let go of what is under way, which the engine forgets when it is closed."""

    def _forget(self, group: _Group) -> None:
        for request in group.requests:
            self._places.pop(request, None)
