"""Answers, what clients have said about them, and which of them a step takes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from leaderless.base.values import Json
from leaderless.config import nearest
from leaderless.config.environment import MAX_REWARD, OnlineConfig
from leaderless.environments.episode import Said, Trace
from leaderless.serving.http_server import ApiError

MAX_LATENCIES = 1 << 16
"""Requests whose latencies are kept until the next report, the newest ones."""


@dataclass
class Counts:
    """Numbers since the last report; requests in progress then count in the next one.

    Attributes:
        requests: Requests for responses.
        failed: Requests that were answered with an error of the server.
        without_feedback: Responses that were dropped because no feedback came.
        stale: Responses that were dropped because they were too old.
        interrupted: Responses that weights of several versions have sampled.
        latencies_s: Seconds from request to reply, where the rank did nothing but sample.
        latencies_training_s: Seconds from request to reply, where the rank did something else meanwhile.
    """

    requests: int = 0
    failed: int = 0
    without_feedback: int = 0
    stale: int = 0
    interrupted: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    latencies_training_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, number: int = 1) -> None:
        """Add to one of the numbers."""
        with self._lock:
            setattr(self, name, getattr(self, name) + number)

    def replied(self, seconds: float, *, is_crossed: bool) -> None:
        """Add the time that a request took, and whether the rank did something else in it."""
        with self._lock:
            (self.latencies_training_s if is_crossed else self.latencies_s).append(seconds)

    def take(self) -> Counts:
        """Counts since the last call; counting begins anew."""
        with self._lock:
            taken = replace(self)
            vars(self).update(vars(Counts()), _lock=self._lock)
            return taken


def percentile_95(values: Iterable[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1] if ordered else 0.0


REMEMBERED = 1 << 16
"""Replies that are gone of which it is remembered why, the newest ones."""
TRAINED = "a step has been trained with it, so that feedback comes too late"


@dataclass(eq=False)
class ReplyChoice:
    """A response.

    Attributes:
        trace: Messages of the request and the response.
        model_s: Seconds that the answer took.
        feedback: Word or number that a client has sent last; None before that.
        reward: Reward that follows from the feedback; None before that.
    """

    trace: Trace
    model_s: float
    feedback: Json = None
    reward: float | None = None

    @cached_property
    def said(self) -> Said:
        """Facts about the answer."""
        said = self.trace.said()[0].said
        assert said is not None
        return said

    @cached_property
    def oldest(self) -> int:
        """Version of the weights that sampled its oldest token."""
        return min(self.said.policy_versions)


@dataclass(eq=False)
class OnlineReply:
    """The responses to one request.

    Attributes:
        id: Name that clients know it by.
        arrived_s: Time at which the request came.
        given_s: Time at which the client was given the responses.
        choices: Those of them that have not been dropped, by their numbers.
        dropped: Reasons why others were dropped, by their numbers.
    """

    id: str
    arrived_s: float
    given_s: float
    choices: dict[int, ReplyChoice]
    dropped: dict[int, str] = field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether there is feedback for all of them."""
        return all(choice.reward is not None for choice in self.choices.values())


class ReplyLedger:
    """Replies from when they are given until a step takes them. Several threads may use it at the same time.

    Attributes:
        counts: Numbers of events since the last report.
    """

    def __init__(self, config: OnlineConfig, group_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no reply yet; a full group has `group_size` responses."""
        self.counts = Counts()
        self._config, self._group_size, self._clock = config, group_size, clock
        self._replies: dict[str, OnlineReply] = {}
        self._gone: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._groups: list[list[OnlineReply]] | None = None  # None if they have to be formed again
        self._num_judged = 0
        self._lock = threading.RLock()

    def add(self, identity: str, arrived_s: float, choices: Sequence[ReplyChoice]) -> None:
        """Note what a client is given."""
        with self._lock:
            self._replies[identity] = OnlineReply(identity, arrived_s, self._clock(), dict(enumerate(choices)))
            num_interrupted = sum(len({*choice.said.policy_versions}) > 1 for choice in choices)
            self.counts.add("interrupted", num_interrupted)

    def judge(self, posted: Mapping[str, Json]) -> float:
        """Note what a client says about a response; returns what that is worth.

        Raises:
            ApiError: It cannot be understood, or the response is not known, or not any more.
        """
        reward = self._reward(posted)
        identity, number = posted.get("id"), posted.get("choice")
        if not isinstance(identity, str):
            raise ApiError(400, f"id={identity!r:.80} must be the `id` of a reply", "id")
        with self._lock:
            if identity in self._gone:
                status, reason = self._gone[identity]
                raise ApiError(status, f"reply '{identity}' is not waiting for feedback: {reason}", "id")
            if identity not in self._replies:
                raise ApiError(
                    404,
                    f"no reply '{identity:.80}' waits for feedback here: send it to the address that gave the reply; "
                    "replies that were given before the run was started again are forgotten",
                    "id",
                    "reply_not_found",
                )
            reply = self._replies[identity]
            choice, word = self._choice(reply, 0 if number is None else number), posted.get("feedback")
            is_first = choice.reward is None
            choice.reward, choice.feedback = reward, reward if word is None else word
            self._num_judged += is_first
            if is_first and reply.is_judged:
                self._groups = None
        return reward

    def _reward(self, posted: Mapping[str, Json]) -> float:
        words, word, reward = self._config.feedback, posted.get("feedback"), posted.get("reward")
        if unknown := {*posted} - {"id", "choice", "feedback", "reward"}:
            raise ApiError(400, f"unknown field {min(unknown)}: send id, choice, and feedback or reward", min(unknown))
        if (word is None) == (reward is None):
            raise ApiError(400, "give either feedback, a word, or reward, a number", "feedback")
        if word is not None:
            if not isinstance(word, str) or word not in words:
                hint = nearest(word, words) if isinstance(word, str) else ""
                message = f"feedback={word!r:.80} must be one of {', '.join(words)}{hint if 'mean' in hint else ''}"
                raise ApiError(400, f"{message}; or send a number as reward", "feedback")
            return words[word]
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
            raise ApiError(400, f"reward={reward!r:.80} must be a finite number, at most {MAX_REWARD:g}", "reward")
        return float(reward)

    def _choice(self, reply: OnlineReply, number: Json) -> ReplyChoice:
        if isinstance(number, int) and number in reply.dropped:
            what = f"choice {int(number)} of reply '{reply.id}'"
            raise ApiError(410, f"{what} is not waiting for feedback: {reply.dropped[number]}", "choice")
        if isinstance(number, bool) or not isinstance(number, int) or number not in reply.choices:
            known = ", ".join(map(str, reply.choices))
            raise ApiError(400, f"choice={number!r:.80} must be the index of a choice of the reply: {known}", "choice")
        return reply.choices[number]

    def sweep(self, version: int) -> None:
        """Drop what has waited for feedback for too long, and what is too old for weights of a version."""
        with self._lock:
            now_s = self._clock()
            for reply in list(self._replies.values()):
                is_late = now_s - reply.given_s > self._config.feedback_timeout_s
                for number, choice in list(reply.choices.items()):
                    if version - choice.oldest > self._config.max_staleness:
                        self._drop(reply, number, f"it is older than {self._config.max_staleness} optimizer steps")
                        self.counts.add("stale")
                    elif is_late and choice.reward is None:
                        waited = f"no feedback came for {self._config.feedback_timeout_s:g} s"
                        self._drop(reply, number, f"{waited}; online.feedback_timeout_s sets how long it is kept")
                        self.counts.add("without_feedback")

    def _drop(self, reply: OnlineReply, number: int, reason: str) -> None:
        self._num_judged -= reply.choices.pop(number).reward is not None
        reply.dropped[number] = reason
        self._groups = None
        if not reply.choices:
            self._forget(reply, 410, reason)

    def _forget(self, reply: OnlineReply, status: int, reason: str) -> None:
        del self._replies[reply.id]
        self._gone[reply.id] = status, reason
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def num_groups(self) -> int:
        """Number of groups that a step may take."""
        with self._lock:
            return len(self._formed())

    def num_judged(self) -> int:
        """Number of responses with feedback that no step has taken."""
        return self._num_judged

    def take(self, num_groups: int) -> list[list[tuple[OnlineReply, int, ReplyChoice]]]:
        """Take groups, of which there must be as many; each response with its reply and its number in that."""
        with self._lock:
            groups = self._formed()[:num_groups]
            assert len(groups) == num_groups, "whoever takes groups waits for them"
            for reply in (reply for group in groups for reply in group):
                self._forget(reply, 409, TRAINED)
            self._groups = None
            self._num_judged -= sum(len(reply.choices) for group in groups for reply in group)
            return [
                [(reply, number, choice) for reply in group for number, choice in reply.choices.items()]
                for group in groups
            ]

    def _formed(self) -> list[list[OnlineReply]]:
        if self._groups is None:
            judged = sorted(
                (reply for reply in self._replies.values() if reply.is_judged), key=lambda reply: reply.arrived_s
            )
            places = grouped([len(reply.choices) for reply in judged], self._group_size)
            self._groups = [[judged[place] for place in group] for group in places]
        return self._groups


def grouped(sizes: Sequence[int], group_size: int) -> list[list[int]]:
    """The groups that are complete, in the order of their first requests.

    Each request goes into the first group that is not complete and has room for all of its responses. A group is
    complete when it is full, or more than half full when a later request does not fit into it; so no size of requests
    waits forever.

    Args:
        sizes: Number of responses of each request, in the order in which requests came; each at most `group_size`.
        group_size: Number of responses of a full group.

    Returns:
        Places of the requests of each group.
    """
    complete: list[list[int]] = []
    growing: list[tuple[int, list[int]]] = []  # room and places of each; few, as those that are passed are complete
    for place, size in enumerate(sizes):
        chosen = next((number for number, (room, _) in enumerate(growing) if room >= size), len(growing))
        if chosen == len(growing):
            growing.append((group_size, []))
        room, group = growing[chosen]
        growing[chosen] = room - size, [*group, place]
        is_complete = [
            not room or (number < chosen and 2 * room < group_size) for number, (room, _) in enumerate(growing)
        ]
        complete += [group for (_, group), is_done in zip(growing, is_complete, strict=True) if is_done]
        growing = [one for one, is_done in zip(growing, is_complete, strict=True) if not is_done]
    return sorted(complete)
