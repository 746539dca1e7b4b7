"""Has questions answered by a server, many at a time, each with a deadline. Imports no torch."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from leaderless.config.judges import JudgeOptions
from leaderless.config.run import MIN_FAILURES
from leaderless.rewards.judges.client import AnswerCache, ChatClient, JudgeAnswer, RequestError, key_of
from leaderless.rewards.judges.verdicts import Message, VerdictError

FIRST_WAIT_S = 0.5
"""Mean seconds before a request is repeated for the first time; each further time it is twice as long."""
LONGEST_WAIT_S = 8.0
MAX_QUOTED = 4000
"""Characters of an answer that a reminder quotes."""
LEEWAY_S = 5.0
"""Seconds beyond its deadline after which a question is abandoned, whatever its thread is doing."""
TICK_S = 0.25


@dataclass(frozen=True, eq=False)
class JudgeQuestion:
    """Question to a judge.

    Attributes:
        messages: Messages of a chat.
        read: Function that finds the verdict in what the judge says, or raises `VerdictError`.
    """

    messages: tuple[Message, ...]
    read: Callable[[str], object]


@dataclass(frozen=True)
class JudgeReply:
    """Outcome of a question.

    Attributes:
        verdict: Verdict as parsed; None if the question failed.
        said: Last words of the judge; empty if there are none.
        error: Reason why there is no verdict; None if there is one.
        seconds: Time that it took.
        num_requests: Requests that were sent; 0 if all that the judge says was known.
    """

    verdict: object = None
    said: str = ""
    error: str | None = None
    seconds: float = 0.0
    num_requests: int = 0


class Asker(Protocol):
    """Who asks a judge."""

    def ask(self, questions: Sequence[JudgeQuestion], on_news: Callable[[str], None]) -> list[JudgeReply]:
        """The replies to questions, in their order; `on_news` is called whenever some have been answered."""


def reminder(messages: Sequence[Message], answer: JudgeAnswer, problem: str) -> tuple[Message, ...]:
    """Messages that ask once more, after an answer in which no verdict could be read."""
    return (
        *messages,
        {"role": "assistant", "content": answer.text[-MAX_QUOTED:]},
        {"role": "user", "content": f"Your verdict cannot be read: {problem}. Answer again, in the form asked for."},
    )


def unreadable(problem: str, answer: JudgeAnswer, options: JudgeOptions) -> str:
    """The error of an answer in which no verdict can be read, with the remedy."""
    if answer.is_cut:
        remedy = f"it ends at max_answer_tokens={options.max_answer_tokens}: raise it"
    else:
        remedy = "say in `prompt` how the verdict must look, and in `parse` how it is found"
    end = " ".join(answer.text.split())[-100:]
    return f"VerdictError: {problem} in what the judge says, which ends with {end!r}; {remedy}"


class ServerAsker:
    """Asks a server with OpenAI's API. See `Asker`."""

    def __init__(self, options: JudgeOptions, cache: AnswerCache) -> None:
        """Read the key of the server; nothing connects before the first question.

        Raises:
            ValueError: The environment does not have the key of the server.
        """
        self.options, self.cache, self.client = options, cache, ChatClient(options)
        self._free_at = 0.0
        """Time of the monotonic clock before which the server wants no requests."""

    def ask(self, questions: Sequence[JudgeQuestion], on_news: Callable[[str], None]) -> list[JudgeReply]:
        """Ask the server, equal questions once; several threads send requests at the same time."""
        keys = [key_of(self.client.body(question.messages)) for question in questions]
        first = {key: place for place, key in reversed([*enumerate(keys)])}
        places = sorted(first.values())
        call = _Call(len(places), lambda number, may_go_on: _Talk(self, may_go_on).reply(questions[places[number]]))
        replies = call.run(self.options.max_requests, self.options.timeout_s + LEEWAY_S, self.client.end_late, on_news)
        found = dict(zip(places, replies, strict=True))
        return [
            found[place] if first[key] == place else replace(found[first[key]], num_requests=0, seconds=0.0)
            for place, key in enumerate(keys)
        ]

    def wait(self, repeated: int, wait_s: float | None, deadline: float) -> bool:
        """Wait before a request that was sent some times before; false if that would be too long.

        The server may ask to wait for some seconds.
        """
        now = time.monotonic()
        if wait_s is not None:
            self._free_at = max(self._free_at, now + wait_s)
        # Without jitter, requests that were refused together would come back together.
        jitter = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        pause_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (repeated - 1)) * jitter if repeated else 0.0
        until = max(now + pause_s, self._free_at + (FIRST_WAIT_S * jitter if self._free_at > now else 0.0))
        if until >= deadline:
            return False
        time.sleep(max(0.0, until - now))
        return True


class _Talk:
    """Requests that one question needs."""

    def __init__(self, asker: ServerAsker, may_go_on: Callable[[], bool]) -> None:
        self._asker, self._options, self._may_go_on = asker, asker.options, may_go_on
        self._begin = time.monotonic()
        self._num_failed = self._num_requests = 0

    def reply(self, question: JudgeQuestion) -> JudgeReply:
        """Ask, and remind the judge of the form of the verdict as often as is allowed."""
        messages, said, error = question.messages, "", ""
        verdict: object = None
        for _ in range(self._options.retries + 1):
            try:
                answer = self._answer(messages)
            except RequestError as problem:
                error = f"{type(problem).__name__}: {problem}"
                break
            said = answer.text
            try:
                verdict, error = question.read(said), ""
                break
            except VerdictError as problem:
                error = unreadable(str(problem), answer, self._options)
                messages = reminder(messages, answer, str(problem))
        return JudgeReply(verdict, said, error or None, time.monotonic() - self._begin, self._num_requests)

    def _answer(self, messages: Sequence[Message]) -> JudgeAnswer:
        """The answer to messages, which may be known; a RequestError if there is none."""
        key = key_of(self._asker.client.body(messages))
        if (answer := self._asker.cache.get(key)) is not None:
            return answer
        deadline, wait_s = self._begin + self._options.timeout_s, None
        last = RequestError("no answer in time", may_repeat=False)
        while self._may_go_on() and self._asker.wait(self._num_failed, wait_s, deadline):
            self._num_requests += 1
            try:
                answer = self._asker.client.ask(messages, deadline)
            except RequestError as error:
                last, wait_s = error, error.wait_s
                self._num_failed += 1
                if not error.may_repeat or self._num_failed > self._options.retries:
                    break
            else:
                self._asker.cache.put(key, answer)
                return answer
        limit = f"timeout_s={self._options.timeout_s:g}"
        if wait_s is not None:
            more = f"; it asks to wait {wait_s:g} s ({limit}): lower max_requests, or raise timeout_s"
        elif str(last) == "no answer in time":
            more = f" ({limit}): raise it, lower max_requests, or look at the load of {self._options.url}"
        else:
            more = f"; asked {self._num_requests} times" if self._num_requests > 1 else ""
        raise RequestError(f"{last}{more}", may_repeat=False)


class _Call:
    """Questions that are answered together, in threads that end with them."""

    def __init__(self, count: int, reply: Callable[[int, Callable[[], bool]], JudgeReply]) -> None:
        self._reply = reply
        self._waiting = deque(range(count))
        self._began: dict[int, float] = {}
        self._replies: dict[int, JudgeReply] = {}
        self._failed_in_row = 0
        self._last_error = ""
        self._is_over = False
        self._lock, self._news = threading.Lock(), threading.Event()

    def run(
        self, num_threads: int, limit_s: float, look_after: Callable[[], None], on_news: Callable[[str], None]
    ) -> list[JudgeReply]:
        """The replies, in order. A question is abandoned after some seconds; `look_after` is called now and then."""
        count, limit = len(self._waiting), max(MIN_FAILURES, 2 * num_threads)
        try:
            for _ in range(min(count, num_threads)):
                self._start()
            while len(self._replies) < count:
                self._news.wait(TICK_S)
                if self._news.is_set():
                    self._news.clear()
                    on_news(f", {len(self._replies)}/{count} answers of a judge")
                look_after()
                self._give_up(limit_s, limit)
        finally:
            self._is_over = True
        return [self._replies[number] for number in range(count)]

    def _start(self) -> None:
        threading.Thread(target=self._work, name="judge", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._is_over or not self._waiting:
                    return
                number = self._waiting.popleft()
                self._began[number] = time.monotonic()
            try:
                reply = self._reply(number, lambda: not self._is_over)
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: the question has failed
                reply = JudgeReply(error=f"{type(error).__name__}: {error}")
            with self._lock:
                if number in self._replies:
                    return  # it was abandoned, and another thread took this one's place
                self._add(number, reply)

    def _add(self, number: int, reply: JudgeReply) -> None:
        self._replies[number] = reply
        del self._began[number]
        # An answer that cannot be read is a sign of life, too.
        self._failed_in_row = self._failed_in_row + 1 if reply.error and not reply.said else 0
        self._last_error = reply.error or self._last_error
        self._news.set()

    def _give_up(self, limit_s: float, limit: int) -> None:
        """Fail questions whose threads hang, and all that wait if the server answers none."""
        now = time.monotonic()
        with self._lock:
            for number in [number for number, began in self._began.items() if now - began > limit_s]:
                self._add(number, JudgeReply(error=f"TimeoutError: no answer within {limit_s:g} s", num_requests=1))
                self._start()
            while self._failed_in_row >= limit and self._waiting:
                error = f"RequestError: not asked, as {limit} questions in a row failed: {self._last_error}"
                number = self._waiting.popleft()
                self._replies[number] = JudgeReply(error=error)
                self._news.set()
