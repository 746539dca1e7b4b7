"""Episodes of a run that is followed: what its folder has, and what is asked again from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from leaderless.config import RecipeError
from leaderless.config.rollout import SamplingConfig
from leaderless.observability.episode_files import EpisodeJournal
from leaderless.observability.run_directory import RunDirectory
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.worker.asynchronous.episodes import EpisodeEnd, EpisodeGroup, EpisodesInFlight
from leaderless.worker.asynchronous.in_flight import Advance, EngineRequests, Events, PendingRequest, Tally
from leaderless.worker.asynchronous.journal import PastEpisodes


class Engine:
    """Answers each request with its last token plus one, in one step."""

    def __init__(self) -> None:
        self.requests: list[tuple[Request, SamplingParams]] = []
        self.num_answered = 0
        self.aborted: list[int] = []

    def submit(self, request: Request, params: SamplingParams) -> int:
        self.requests.append((request, params))
        return len(self.requests) - 1

    def step(self) -> list[Delta]:
        new, self.num_answered = range(self.num_answered, len(self.requests)), len(self.requests)
        return [
            Delta(number, 0, [self.requests[number][0].prompt[-1] + 1], [-0.5], finish_reason="stop", policy_version=3)
            for number in new
        ]

    def forget(self, conversation: int) -> None:
        """Keep nothing."""

    def abort(self, request: int) -> None:
        """Note it."""
        self.aborted.append(request)


def test_what_was_asked_is_asked_again_from_what_each_conversation_had_anew() -> None:
    def nothing(_: Completion) -> None:
        """Take no answer."""

    greedy, sampled = SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.7)
    engines = [Engine(), Engine()]
    first, again = (EngineRequests(cast("SharedEngine", one), Events(), [sampled, greedy]) for one in engines)
    first_events = first.events
    prompts: list[tuple[list[int], int | None]] = [([5, 6], 1), ([5, 6, 7, 9], 1), ([5, 8], 1), ([5, 8], None)]
    for number, (prompt, conversation) in enumerate(prompts):
        params = SamplingParams([sampled, greedy][number % 2], 9 - number, ("x",) * number, seed=4)
        first.ask(PendingRequest(Request(prompt, [number], conversation=conversation), params, number, nothing))
        first.step()
        again.ask(again.noted(number, first_events.facts[number], 4, nothing))
        again.step()
    assert [fact["tokens"] for fact in first_events.facts] == [[5, 6], [9], [8], [5, 8]]
    assert engines[0].requests == engines[1].requests
    assert again.events == first_events


def test_what_an_episode_drops_late_is_not_that_of_the_one_that_was_begun_again() -> None:
    answers: list[str] = []
    engine, events = Engine(), Events()
    orders = EngineRequests(cast("SharedEngine", engine), events, [greedy := SamplingConfig(temperature=0.0)])
    params = SamplingParams(greedy, 9, (), seed=4)
    first, again, third = (
        PendingRequest(Request([5], [7]), params, 0, lambda _, name=name: answers.append(name))  # type: ignore[misc]
        for name in ("first", "again", "third")
    )
    orders.ask(first)
    orders.step()
    orders.ask(again)
    assert orders.drop(first) == 0
    assert not engine.aborted
    orders.ask(third)
    assert orders.oldest(7) is again
    orders.drop(again)
    orders.step()
    assert (answers, engine.aborted) == (["first", "third"], [1])
    assert [kind for _, kind, _ in events.happened] == ["ask", "ask", "ask", "drop"]


def test_an_episode_that_ends_late_is_not_that_of_the_group_that_was_begun_again() -> None:
    before, now = (EpisodeGroup(3, (), 1) for _ in range(2))
    requests = SimpleNamespace(events=Events())
    in_flight = cast("EpisodesInFlight", SimpleNamespace(_groups={3: now}, _requests=requests, tally=Tally()))
    end = EpisodesInFlight._end
    assert not end(in_flight, 7, EpisodeEnd(before, 1, 5, RuntimeError("it was canceled")))
    assert not requests.events.happened
    assert end(in_flight, 7, EpisodeEnd(now, 2, 9)) == [Advance(3, False, True)]
    assert (before.num_tokens, now.num_tokens) == (0, 9)


@pytest.mark.parametrize("read", [lambda past: next(past.asked(2)), lambda past: past.episodes(2)])
def test_a_run_that_has_not_kept_all_episodes_cannot_be_followed(
    tmp_path: Path, read: Callable[[PastEpisodes], object]
) -> None:
    journal = EpisodeJournal(RunDirectory(tmp_path), 3, 10)
    journal.write("step", 1, "asked", lambda: ['{"ask": 7}'])
    journal.flush()
    past = PastEpisodes(tmp_path / "episodes", 3)
    assert list(past.asked(1)) == [{"ask": 7}]
    with pytest.raises(RecipeError, match=r"none of iteration 2 .* run\.kept_episodes"):
        read(past)
