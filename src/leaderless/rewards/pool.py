"""Computes the rewards of many responses, in processes next to the worker. Imports no torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Self

from leaderless.base.values import Json
from leaderless.config.rewards import RewardsConfig
from leaderless.config.run import MIN_FAILURES
from leaderless.rewards.dispatcher import Dispatcher
from leaderless.rewards.judges.asking import Asker
from leaderless.rewards.judges.client import AnswerCache
from leaderless.rewards.judges.judge import AnswerFile, Judge, Judged, JudgeUsage, make_judges
from leaderless.rewards.protocol import (
    AnyReward,
    Failures,
    GradingOutcome,
    RewardInput,
    grade,
    takes_batch,
)
from leaderless.rewards.registry import make_rewards

Askers = Mapping[str, Asker]
"""Clients that ask judges that are roles, by the name of the reward."""
Found = Mapping[tuple[str, int], Judged]
"""What judges have found, by reward and index of the response."""


@dataclass(frozen=True)
class Graded:
    """The reward of a response.

    Attributes:
        value: Weighted sum over the rewards that apply to it, finite; 0 if not valid.
        is_valid: Whether all of them could be computed; a response that is not valid must not be trained on.
        details: Results by reward, `{"value": 1.0, "answer": "42"}` before weighting or `{"error": "..."}`, and what a
            judge has said; the key `reward` holds an error of the sum itself, as when no reward applies.
        seconds: Time that the rewards took.
        asked: Questions and time of the judges, by reward.
        is_broken: Whether it is not valid because a reward failed, so that it may be graded again.
    """

    value: float
    is_valid: bool
    details: Mapping[str, Json]
    seconds: float = field(default=0.0, compare=False)
    asked: Mapping[str, JudgeUsage] = field(default_factory=dict, compare=False)
    is_broken: bool = False

    @property
    def first_error(self) -> str:
        """Name and error of the first reward that failed; empty if none did."""
        errors = ((name, one.get("error")) for name, one in self.details.items() if isinstance(one, Mapping))
        return next((f"{name}: {error}" for name, error in errors if error), "")


class RewardPool:
    """Computes the rewards of a recipe in processes; a reward that hangs or crashes fails its own response alone.

    Calls of several threads wait for each other. Results do not depend on the number of processes. Judges, which only
    wait for their models, are asked by threads of this process.

    Args:
        config: The recipe's `reward` section; without any reward, no process is started.
        num_processes: Number of processes. With 0, rewards are computed in this process: for debuggers and notebooks.
            Then no time limit is enforced, and a reward that crashes ends this process.
        on_news: Function to call, with how many are done, whenever some responses have been graded.
        answers: File of the answers of judges.
        failures: Counter of failures, by which rewards that only fail are given up.

    Attributes:
        kept_answers: Answers of judges, which their askers share.

    Raises:
        RecipeError: A judge cannot be made.
        ValueError: `num_processes` is negative, or the environment does not have the key of a judge's server.
    """

    def __init__(
        self,
        config: RewardsConfig,
        num_processes: int,
        on_news: Callable[[str], None] = lambda part: None,  # noqa: ARG005
        answers: AnswerFile = AnswerFile(),  # noqa: B008 - frozen
        failures: Failures | None = None,
    ) -> None:
        if num_processes < 0:
            raise ValueError(f"num_processes={num_processes}: must be at least 0")
        self._config, self._options, self._all = config.without_judges(), config.options(), config
        self._on_news, self.failures = on_news, failures or Failures()
        size = max((options.kept_answers for options in config.judges().values()), default=0)
        self.kept_answers = AnswerCache(answers.path, size, answers.may_fail)
        self._judges: Mapping[str, Judge] = make_judges(config.judges(), self.kept_answers)
        self._dispatcher = Dispatcher(self._config, num_processes, on_news) if num_processes else None
        self._rewards: Mapping[str, AnyReward] = {}
        """Rewards that are computed in this process."""
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the processes now, so that the first responses do not wait for them; return at once.

        Call it from a thread that lives as long as the pool: the system ends the processes together with the thread
        that started them.

        Raises:
            RuntimeError: The pool is closed.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed; make a new one")
        if self._dispatcher and self._config.options():
            self._dispatcher.start()
        elif not self._rewards:
            self._rewards = make_rewards(self._config, in_worker=True)

    def grade(
        self, samples: Sequence[RewardInput], sources: Sequence[str | None], askers: Askers = MappingProxyType({})
    ) -> list[Graded]:
        """Compute the rewards of responses, in order, by all rewards that apply to their source.

        Args:
            samples: The responses.
            sources: Source of the row of each response; None where the recipe names no such column.
            askers: Clients that ask those judges that are roles, by name. They are asked by the thread that calls,
                one after the other, with all of the responses at once, after rewards that are no judges.

        Raises:
            ValueError: The numbers of samples and sources differ.
            RuntimeError: The pool is closed, or its processes cannot load the rewards or do not stay alive.
        """
        if self._is_closed:
            self.start()  # it says so
        if len(samples) != len(sources):
            raise ValueError(f"there are {len(samples)} samples but {len(sources)} sources; give one for each sample")
        applying = {source: self._all.applying(source) for source in set(sources)}
        # Responses to several prompts come first: a row that cannot be graded is no reason to give a reward up.
        first = {sample.group: index for index, sample in reversed([*enumerate(samples)])}
        order = dict.fromkeys([*sorted(first.values())[:MIN_FAILURES], *range(len(samples))])
        work = {name: [i for i in order if name in applying[sources[i]]] for name in self._options}
        judged = {name: sorted(work.pop(name)) for name in self._judges}
        elsewhere = {name: places for name, places in judged.items() if self._judges[name].options.role is None}
        here = {name: places for name, places in judged.items() if name not in elsewhere}
        with self._lock:
            asking = _in_thread(partial(self._judge, samples, elsewhere, {})) if elsewhere else None
            self.failures.begin()
            outcomes = self._grade_alone(samples, work, self.failures)
            said = {**(self._judge(samples, here, askers) if here else {}), **(asking.result() if asking else {})}
            self._on_news("")
        outcomes = {**outcomes, **{place: one.outcome for place, one in said.items()}}
        return [
            self._sum(
                {name: outcomes[name, index] for name in applying[source]},
                {name: said[name, index] for name in applying[source] if name in self._judges},
            )
            if applying[source]
            else _no_reward(source)
            for index, source in enumerate(sources)
        ]

    def try_on(self, sample: RewardInput, source: str | None) -> dict[str, str]:
        """Errors, by reward, of those that cannot grade a response; judges are not asked, and nothing is counted."""
        work = {name: [0] for name in self._all.applying(source) if name not in self._judges}
        with self._lock:
            outcomes = self._grade_alone([sample], work, Failures())
        return {name: outcome.error for (name, _), outcome in outcomes.items() if outcome.error is not None}

    def close(self) -> None:
        """End the processes. Closing twice has no further effect."""
        self._is_closed = True
        if self._dispatcher:
            self._dispatcher.stop()

    def __enter__(self) -> Self:
        """Start the processes."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes."""
        self.close()

    def _grade_alone(
        self, samples: Sequence[RewardInput], work: Mapping[str, Sequence[int]], failures: Failures
    ) -> Mapping[tuple[str, int], GradingOutcome]:
        """Outcomes of rewards that are no judges."""
        if self._dispatcher:
            return self._dispatcher.run(samples, work, failures)
        if not self._rewards:
            self.start()
        found: dict[tuple[str, int], GradingOutcome] = {}
        for name, indices in work.items():
            reward, outcomes = self._rewards[name], list[GradingOutcome]()
            for call in [sorted(indices)] * bool(indices) if takes_batch(reward) else [[index] for index in indices]:
                if outcomes and outcomes[-1].error and (error := failures.hopeless(name)):
                    outcomes = [GradingOutcome(error=error)]
                else:
                    outcomes = grade(reward, [samples[index] for index in call], caught=(Exception, SystemExit))
                    failures.add(name, outcomes)
                    self._on_news(f", {len(found) + len(outcomes)}/{sum(map(len, work.values()))} graded")
                found |= {(name, index): outcome for index, outcome in zip(call, outcomes, strict=True)}
        return found

    def _judge(self, samples: Sequence[RewardInput], work: Mapping[str, Sequence[int]], askers: Askers) -> Found:
        found: dict[tuple[str, int], Judged] = {}
        for name, indices in work.items():
            judged = self._judges[name].grade([samples[i] for i in indices], self._on_news, askers.get(name))
            found |= {(name, index): one for index, one in zip(indices, judged, strict=True)}
        return found

    def _sum(self, outcomes: Mapping[str, GradingOutcome], judged: Mapping[str, Judged]) -> Graded:
        details: dict[str, Json] = {}
        for name, outcome in outcomes.items():
            notes = judged[name].notes if name in judged else {}
            found: dict[str, Json] = {"value": outcome.value, "answer": outcome.answer}
            if outcome.error is not None:
                found = {"error": outcome.error}
            details[name] = {**found, **notes}
        graded = Graded(
            0.0,
            is_valid=False,
            details=details,
            seconds=sum(outcome.seconds for outcome in outcomes.values()),
            asked={name: one.asked for name, one in judged.items()},
            is_broken=True,
        )
        if any(outcome.error is not None for outcome in outcomes.values()):
            return graded
        total = sum(self._options[name].weight * outcome.value for name, outcome in outcomes.items())
        if not math.isfinite(total):
            error = f"OverflowError: the weighted sum of the rewards is {total}, but must be finite"
            return replace(graded, details=details | {"reward": {"error": error}})
        return replace(graded, value=total, is_valid=True, is_broken=False)


def _in_thread(find: Callable[[], Found]) -> Future[Found]:
    """A result that a thread finds, which ends when its questions are answered, even if nobody waits any more."""
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(find())
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            future.set_exception(error)

    threading.Thread(target=run, name="judges", daemon=True).start()
    return future


def _no_reward(source: str | None) -> Graded:
    where = "rows without a source" if source is None else f"source '{source}'"
    error = f"ValueError: no reward applies to {where}; add it to the `sources` of one, or leave out such rows"
    return Graded(0.0, is_valid=False, details={"reward": {"error": error}}, is_broken=True)
