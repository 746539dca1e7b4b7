"""Asks judges that are models of the plan, through their engines."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.judges import JudgeOptions
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.config.run import MIN_FAILURES
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.environments.chat_writer import ChatWriter
from leaderless.rewards.judges.asking import JudgeQuestion, JudgeReply, reminder, unreadable
from leaderless.rewards.judges.client import AnswerCache, JudgeAnswer, key_of
from leaderless.rewards.judges.verdicts import Message, VerdictError
from leaderless.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from leaderless.stages.context import ModelRole


@dataclass(frozen=True)
class Terms:
    """Terms on which a judge of the plan is asked.

    Attributes:
        options: Settings of the judge.
        model: Model that answers.
        longest: Most tokens of a question.
        seed: Seed of the run.
    """

    options: JudgeOptions
    model: ModelConfig
    longest: int
    seed: int

    @property
    def params(self) -> SamplingParams:
        """How answers are sampled."""
        distribution = SamplingConfig(temperature=self.options.temperature)
        return SamplingParams(distribution, self.options.max_answer_tokens, seed=self.seed)

    def key(self, messages: Sequence[Message]) -> str:
        """The key of the answer to messages: a hash of all that it depends on."""
        fields: dict[str, Json] = {
            "path": self.model.path,
            "revision": self.model.revision,
            "dtype": self.model.compute_dtype,
            "messages": [dict(message) for message in messages],
            "temperature": self.options.temperature,
            "max_tokens": self.options.max_answer_tokens,
            "seed": self.seed,
        }
        return key_of(fields)


@dataclass
class _Talk:
    """A question, with what has come of it.

    Attributes:
        question: The question.
        messages: Messages to ask with next: the question's, and perhaps reminders.
        key: Key of the answer to these.
        left: Number of times that the judge may still be reminded.
        answer: Last answer.
        reply: Outcome of the question; None before its end.
        begin: Seconds after which it was first asked.
        num_requests: Number of requests so far.
        completion: Tokens sampled so far of the next answer.
    """

    question: JudgeQuestion
    messages: tuple[Message, ...]
    key: str
    left: int
    answer: JudgeAnswer = field(default_factory=lambda: JudgeAnswer(""))
    reply: JudgeReply | None = None
    begin: float | None = None
    num_requests: int = 0
    completion: Completion = field(default_factory=Completion)


@dataclass(frozen=True)
class _Heard:
    """An answer with what was read in it.

    Attributes:
        text: Text of the answer.
        is_cut: Whether it ends at the largest number of tokens.
        verdict: Its verdict.
        problem: Reason why it has none; None if it has one.
    """

    text: str
    is_cut: bool
    verdict: object = None
    problem: str | None = None


class EngineAsker:
    """Asks the engine of a role; the ranks of its node ask together. See `Asker`.

    The noise of an answer follows from what is asked, so that it is the same on any number of ranks, in any order and
    after a restart, as far as the engine promises that. Ranks that make one engine together must ask it the same, so
    the first of them decides what is known and how it is read.

    Attributes:
        shard: Ranks that make one engine together.
    """

    def __init__(
        self,
        terms: Terms,
        model: ModelRole,
        tokenizer: Tokenizer,
        kept: AnswerCache,
        ranks: ProcessGroup,
        shard: ProcessGroup,
    ) -> None:
        """Ask nothing yet.

        Args:
            terms: Terms of the judge.
            model: Model that answers.
            tokenizer: Tokenizer of the model.
            kept: Answers that are kept.
            ranks: Ranks of the node.
            shard: Ranks that make one engine together, and ask the same.
        """
        self._terms, self._options, self._model = terms, terms.options, model
        self._tokenizer, self._writer = tokenizer, ChatWriter(tokenizer, is_chat=True)
        self._kept = kept if terms.options.kept_answers else AnswerCache(None, 0)
        self._ranks, self.shard = ranks, shard
        self._failed_in_row = 0

    def ask(self, questions: Sequence[JudgeQuestion], on_news: Callable[[str], None]) -> list[JudgeReply]:
        """Ask equal questions once. All ranks of the node call it together."""
        talks: dict[str, _Talk] = {}
        keys = [self._terms.key(question.messages) for question in questions]
        for key, question in zip(keys, questions, strict=True):
            talks.setdefault(key, _Talk(question, question.messages, key, self._options.retries))
        for talk in talks.values():
            self._follow(talk, None, 0.0)
        waiting = deque(talk for talk in talks.values() if talk.reply is None)
        # The engine takes memory and weights on all ranks of the node, or on none.
        if self._ranks.max(torch.tensor([len(waiting)]), "the questions to a judge"):
            with self._model.generating() as engine:
                self._run(engine, waiting, on_news)
        replies, told = list[JudgeReply](), set[str]()
        for key in keys:
            reply = talks[key].reply
            assert reply is not None, "each question ends"
            replies.append(replace(reply, num_requests=0, seconds=0.0) if key in told else reply)
            told.add(key)
        return replies

    def _run(self, engine: RolloutEngine, waiting: deque[_Talk], on_news: Callable[[str], None]) -> None:
        """Have questions answered, as many at a time as is allowed, each within its time."""
        start, now, self._failed_in_row = time.monotonic(), 0.0, 0
        under_way, count = dict[int, _Talk](), len(waiting)
        while waiting or under_way:
            while waiting and len(under_way) < self._options.max_requests:
                self._begin(engine, waiting.popleft(), under_way, now)
            deltas = engine.step() if under_way else ()
            now = self._seconds_since(start)
            for delta in deltas:
                talk = under_way.get(delta.request)
                if talk is None:
                    continue  # the end of an abandoned one is reported, too
                talk.completion.add(delta)
                if delta.finish_reason is not None:
                    del under_way[delta.request]
                    self._take(talk, now)
                    if talk.reply is None:
                        waiting.appendleft(talk)
            for number in [number for number, talk in under_way.items() if self._is_late(talk, now)]:
                engine.abort(number)
                self._give_up(under_way.pop(number), now, self._late)
            on_news(f", {count - len(waiting) - len(under_way)}/{count} answers of a judge")

    def _seconds_since(self, start: float) -> float:
        """The time, the same on all ranks of an engine, which must give up the same questions."""
        seconds = torch.tensor([time.monotonic() - start], dtype=torch.float64)
        return float(self.shard.max(seconds, "the time that a judge has taken"))

    @property
    def _late(self) -> str:
        limit = f"timeout_s={self._options.timeout_s:g}"
        return f"TimeoutError: no answer in time ({limit}): raise it, or lower max_requests"

    def _is_late(self, talk: _Talk, now: float) -> bool:
        return talk.begin is not None and now - talk.begin > self._options.timeout_s

    def _begin(self, engine: RolloutEngine, talk: _Talk, under_way: dict[int, _Talk], now: float) -> None:
        """Ask a question, unless it cannot be asked."""
        limit = max(MIN_FAILURES, 2 * self._options.max_requests)
        if talk.begin is None and self._failed_in_row >= limit:
            talk.reply = JudgeReply(error=f"TimeoutError: not asked, as {limit} questions in a row had no answer")
            return
        try:
            prompt = self._writer.fresh(talk.messages)
        except RecipeError as error:
            talk.reply = JudgeReply(error=f"ValueError: {error}")
            return
        if len(prompt) > self._terms.longest:
            talk.reply = self._too_long(talk, len(prompt), now)
            return
        talk.begin, talk.completion = now if talk.begin is None else talk.begin, Completion()
        talk.num_requests += 1
        under_way[engine.submit(Request(prompt, (_noise_of(talk.messages),)), self._terms.params)] = talk

    def _take(self, talk: _Talk, now: float) -> None:
        """Keep a whole answer, and read it."""
        if talk.completion.finish_reason == "aborted":
            self._give_up(talk, now, "RuntimeError: the engine has ended the answer early: see its log")
            return
        self._failed_in_row = 0
        text = self._tokenizer.decode(talk.completion.tokens, skip_special_tokens=True)
        answer = JudgeAnswer(text, talk.completion.is_truncated)
        self._kept.put(talk.key, answer)
        self._follow(talk, answer, now)

    def _follow(self, talk: _Talk, answer: JudgeAnswer | None, now: float) -> None:
        """Read an answer, or else the one that is kept, and those that follow: up to the end, or to what is unknown."""
        while talk.reply is None:
            heard = self._heard(talk, answer or self._kept.get(talk.key))
            if heard is None:
                return
            talk.answer, answer = JudgeAnswer(heard.text, heard.is_cut), None
            if heard.problem is None:
                talk.reply = replace(self._reply(talk, now, None), verdict=heard.verdict)
            elif talk.left == 0:
                talk.reply = self._reply(talk, now, unreadable(heard.problem, talk.answer, self._options))
            else:
                talk.left -= 1
                talk.messages = reminder(talk.messages, talk.answer, heard.problem)
                talk.key = self._terms.key(talk.messages)

    def _heard(self, talk: _Talk, answer: JudgeAnswer | None) -> _Heard | None:
        """Verdict that the first rank of the engine reads in its answer; None if it has none.

        Other ranks may keep other answers, and may run out of time in a search that the first one finishes.
        """
        first = self.shard.ranks[0]
        mine = None if answer is None else asdict(_read(talk.question, answer))
        heard = json.loads(self.shard.broadcast_text(json.dumps(mine), first, "what a judge has said"))
        return None if heard is None else _Heard(**heard)

    def _reply(self, talk: _Talk, now: float, error: str | None) -> JudgeReply:
        seconds = 0.0 if talk.begin is None else now - talk.begin
        return JudgeReply(None, talk.answer.text, error, seconds, talk.num_requests)

    def _give_up(self, talk: _Talk, now: float, error: str) -> None:
        self._failed_in_row += 1
        talk.reply = self._reply(talk, now, error)

    def _too_long(self, talk: _Talk, length: int, now: float) -> JudgeReply:
        is_first = talk.messages == talk.question.messages
        what = "the question" if is_first else "the reminder of the form of its verdict"
        error = (
            f"ValueError: {what} has {length:,} tokens for role '{self._options.role}', more than "
            f"max_question_tokens={self._terms.longest:,}: raise it, or shorten what the prompt shows"
        )
        return self._reply(talk, now, error)


def _read(question: JudgeQuestion, answer: JudgeAnswer) -> _Heard:
    try:
        return _Heard(answer.text, answer.is_cut, question.read(answer.text))
    except VerdictError as error:
        return _Heard(answer.text, answer.is_cut, problem=str(error))


def key_of_question(messages: Sequence[Message]) -> str:
    """A hash of what is asked alone, whoever is asked: 32 hexadecimal digits."""
    return key_of({"messages": [dict(message) for message in messages]})


def _noise_of(messages: Sequence[Message]) -> int:
    """The number of an answer, by which engines key their noise: it follows from what is asked alone; 63 bits."""
    return int(key_of_question(messages), 16) >> 65
