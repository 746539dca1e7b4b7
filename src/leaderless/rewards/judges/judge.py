"""A reward that asks a language model. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from operator import add
from pathlib import Path
from typing import cast

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.judges import JudgeOptions
from leaderless.observability.clock import MayFail
from leaderless.rewards.judges.asking import Asker, JudgeQuestion, JudgeReply, ServerAsker
from leaderless.rewards.judges.client import AnswerCache
from leaderless.rewards.judges.verdicts import (
    Choice,
    Pair,
    choice_reader,
    messages_for,
    outcome_of,
    pairs_of,
    rubric_reader,
    scale_of,
    score_reader,
    win_rates,
)
from leaderless.rewards.protocol import GradingOutcome, RewardInput, describe

MAX_SAID = 2000
"""Characters of a judge's words about a response that are kept."""
ALONE = (
    "ValueError: there is no other response to compare with; pairwise needs batch.responses_per_prompt (in "
    "evaluations evaluation.responses_per_prompt) of at least 2"
)


@dataclass(frozen=True)
class JudgeUsage:
    """Effort of grading a response, for metrics.

    Attributes:
        questions: Questions about it; questions of a comparison count for one of its responses.
        cached: Questions whose answers were known.
        requests: Requests that were sent.
        seconds: Time until they were answered, in sum over those that were sent.
        pairs: Comparisons that both positions were answered of.
        contradictions: Those in which the two answers differ.
    """

    questions: int = 0
    cached: int = 0
    requests: int = 0
    seconds: float = 0.0
    pairs: int = 0
    contradictions: int = 0

    @classmethod
    def of(cls, replies: Sequence[JudgeReply]) -> JudgeUsage:
        """Count replies."""
        return cls(
            questions=len(replies),
            cached=sum(one.num_requests == 0 and one.error is None for one in replies),
            requests=sum(one.num_requests for one in replies),
            seconds=sum(one.seconds for one in replies if one.num_requests),
        )

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Judged:
    """Value of a response in the judgment of a judge.

    Attributes:
        outcome: Value from 0 to 1, or the reason why there is none.
        notes: Additional facts to record: the judge's text, and the scores of a rubric.
        asked: Questions and time that grading took.
    """

    outcome: GradingOutcome
    notes: Mapping[str, Json]
    asked: JudgeUsage


class Judge:
    """Grades responses by what a language model says of them. It is a `Reward`, too, for single responses.

    Args:
        options: Settings.
        asker: Client that asks the model; None for one that comes with the responses, as the engine of a role does.
        key: Setting that has them, for errors.

    Raises:
        RecipeError: The function that finds verdicts cannot be loaded.
    """

    def __init__(self, options: JudgeOptions, asker: Asker | None, key: str = "reward.judge") -> None:
        self.options, self._asker, self._key = options, asker, key
        self._read = verdict_reader(options, key)

    def __call__(self, sample: RewardInput, /) -> float:
        """Grade a response alone; a RuntimeError if it cannot be."""
        (judged,) = self.grade([sample])
        if judged.outcome.error is not None:
            raise RuntimeError(judged.outcome.error)
        return judged.outcome.value

    def grade(
        self,
        samples: Sequence[RewardInput],
        on_news: Callable[[str], None] = lambda part: None,  # noqa: ARG005
        asker: Asker | None = None,
    ) -> list[Judged]:
        """Grade responses; those to a prompt are all among them. A judge that has no asker needs one.

        Raises:
            RecipeError: The judge is a role, and no running run has its model.
        """
        asker = asker or self._asker
        if asker is None:
            raise RecipeError.at(
                f"{self._key}.role",
                f"is '{self.options.role}', a model that only a run loads: to ask it without one, start `leaderless "
                f"serve`, and give {self._key}.url and model in its place",
            )
        if self.options.mode == "pairwise":
            return self._compare(samples, asker, on_news)
        more = scale_of(self.options)
        questions: list[JudgeQuestion] = []
        places: dict[int, int] = {}
        judged: dict[int, Judged] = {}
        for place, sample in enumerate(samples):
            try:
                messages = messages_for(self.options, sample, more)
            except ValueError as error:
                judged[place] = _failed(describe(error))
            else:
                places[place] = len(questions)
                questions.append(JudgeQuestion(messages, self._read))
        replies = asker.ask(questions, on_news)
        judged |= {place: self._judged(replies[number]) for place, number in places.items()}
        return [judged[place] for place in range(len(samples))]

    def _judged(self, reply: JudgeReply) -> Judged:
        said: dict[str, Json] = {"said": reply.said[-MAX_SAID:]} if reply.said else {}
        asked = JudgeUsage.of([reply])
        if reply.error is not None:
            return Judged(GradingOutcome(error=reply.error, seconds=reply.seconds), said, asked)
        if self.options.mode == "rubric":
            scores = cast("Mapping[str, float]", reply.verdict)
            weights = {name: one.weight for name, one in self.options.rubric.items()}
            value = sum(weights[name] * score for name, score in scores.items()) / sum(weights.values())
            return Judged(GradingOutcome(value, seconds=reply.seconds), {"criteria": dict(scores), **said}, asked)
        return Judged(GradingOutcome(cast("float", reply.verdict), seconds=reply.seconds), said, asked)

    def _compare(self, samples: Sequence[RewardInput], asker: Asker, on_news: Callable[[str], None]) -> list[Judged]:
        """Compare the responses of each group with each other; equal ones have equal values."""
        assert self.options.pairwise is not None
        groups: dict[int | None, list[int]] = {}
        for place, sample in enumerate(samples):
            groups.setdefault(sample.group, []).append(place)
        responses = [sample.response for sample in samples]
        pairs = [
            pair
            for number, group in groups.items()
            if number is not None
            for pair in pairs_of(responses, group, self.options.pairwise.opponents)
        ]
        questions, problems = self._questions(samples, pairs)
        replies = asker.ask(questions, on_news)
        compared = [_Compared(pair, *replies[2 * number : 2 * number + 2]) for number, pair in enumerate(pairs)]
        rates = win_rates([(one.pair, one.worth) for one in compared if one.worth is not None])
        judged: dict[int, Judged] = {}
        for number, group in groups.items():
            if number is None or len(group) < 2:
                judged |= dict.fromkeys(group, _failed(ALONE))
                continue
            first = {responses[place]: place for place in reversed(group)}
            found = {text: self._of_response(place, rates, compared, problems) for text, place in first.items()}
            for place in group:
                one = found[responses[place]]
                judged[place] = one if first[responses[place]] == place else replace(one, asked=JudgeUsage())
        return [judged[place] for place in range(len(samples))]

    def _questions(
        self, samples: Sequence[RewardInput], pairs: list[Pair]
    ) -> tuple[list[JudgeQuestion], dict[int, str]]:
        """Two questions for each pair, and why some responses cannot be compared; their pairs are removed."""
        questions: list[JudgeQuestion] = []
        problems: dict[int, str] = {}
        kept: list[Pair] = []
        for pair in pairs:
            one, other = (samples[place].response for place in (pair.first, pair.second))
            try:
                both = [
                    messages_for(self.options, samples[pair.first], {"first": first, "second": second})
                    for first, second in ((one, other), (other, one))
                ]
            except ValueError as error:
                problems |= dict.fromkeys((pair.first, pair.second), describe(error))
                continue
            kept.append(pair)
            questions += [JudgeQuestion(messages, self._read) for messages in both]
        pairs[:] = kept
        return questions, problems

    def _of_response(
        self, place: int, rates: Mapping[int, float], compared: Sequence[_Compared], problems: Mapping[int, str]
    ) -> Judged:
        """Value of a response by its comparisons."""
        own = [one for one in compared if place in {one.pair.first, one.pair.second}]
        asked, words, seconds = JudgeUsage(), [], 0.0
        for one in own:
            seconds += sum(reply.seconds for reply in one.replies)
            words.append(one.words(place))
            if one.pair.first == place:
                is_answered = one.worth is not None
                contradictions = int(is_answered and not one.agrees)
                asked += replace(JudgeUsage.of(one.replies), pairs=int(is_answered), contradictions=contradictions)
        notes: dict[str, Json] = {"said": "\n\n".join(words)[:MAX_SAID]} if words else {}
        if place in rates:
            return Judged(GradingOutcome(rates[place], seconds=seconds), notes, asked)
        errors = [problems[place]] if place in problems else [one.error for one in own]
        if errors:
            return Judged(GradingOutcome(error=errors[0], seconds=seconds), notes, asked)
        return Judged(GradingOutcome(0.5), notes, asked)  # all siblings are equal


def verdict_reader(options: JudgeOptions, key: str) -> Callable[[str], object]:
    """The function that finds a verdict in what the judge says."""
    if options.mode == "rubric":
        return rubric_reader(options)
    return choice_reader(options, key) if options.mode == "pairwise" else score_reader(options, key)


class _Compared:
    """A comparison and its two replies."""

    def __init__(self, pair: Pair, straight: JudgeReply, swapped: JudgeReply) -> None:
        self.pair, self.replies = pair, (straight, swapped)
        self.error = straight.error or swapped.error or ""
        self.worth: float | None = None
        self.agrees = False
        if not self.error:
            choices = cast("tuple[Choice, Choice]", (straight.verdict, swapped.verdict))
            self.worth, self.agrees = outcome_of(*choices)

    def words(self, place: int) -> str:
        """Record of the comparison with a response."""
        if self.worth is None:
            return f"[failed] {self.error}"
        worth = self.worth if place == self.pair.first else 1.0 - self.worth
        result = {1.0: "won", 0.0: "lost"}.get(worth, "tie" if self.agrees else "tie, as the answers differ")
        position = "A then B" if place == self.pair.first else "B then A"
        return f"[{result}; shown as {position}] " + " | ".join(reply.said for reply in self.replies)


def _failed(error: str) -> Judged:
    return Judged(GradingOutcome(error=error), {}, JudgeUsage())


@dataclass(frozen=True)
class AnswerFile:
    """Where the answers of judges are kept.

    Attributes:
        path: File of this process, in a folder of such files; None to keep answers in memory alone.
        may_fail: Context in which it is written.
    """

    path: Path | None = None
    may_fail: MayFail = nullcontext


def make_judges(judges: Mapping[str, JudgeOptions], kept: AnswerCache) -> dict[str, Judge]:
    """The judges of a recipe.

    Raises:
        RecipeError: A function that finds verdicts cannot be loaded.
        ValueError: The environment does not have the key of a server.
    """

    def asker(options: JudgeOptions) -> ServerAsker | None:
        return None if options.role else ServerAsker(options, kept if options.kept_answers else AnswerCache(None, 0))

    return {name: Judge(options, asker(options), key=f"reward.{name}") for name, options in judges.items()}
