"""Episodes: turns, limits, failures, and what becomes of them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from random import Random

import pytest
from tests.rows import Characters
from tests.unit.environments.scripted import AsyncCount, Count, ScriptedEngine, play

from leaderless.environments import user_functions
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode
from leaderless.environments.protocol import Environment, EpisodeFailed, Observation, Task, Turn
from leaderless.rollout.engine import Request

PLAIN = ChatWriter(Characters(), is_chat=False)  # type: ignore[arg-type]


def counting(request: Request) -> list[int]:
    """Say the number of the turn: one more than the last one mentioned."""
    numbers = [chr(token) for token in request.prompt if chr(token).isdigit()]
    return [ord(str((int(numbers[-1]) + 1) % 10 if numbers else 1))]


def text_of(episode: Episode) -> str:
    return "".join(map(chr, episode.trace.leaves()[0].context()[1:]))


@pytest.mark.parametrize("make", [Count, AsyncCount])
def test_an_episode_is_what_was_said_and_told(make: type[Environment]) -> None:
    engine = ScriptedEngine(counting)
    (episode,), _ = play(engine, make, PLAIN)
    assert text_of(episode) == "a:1<1>2<2>3"
    assert [node.said.reward for node in episode.trace.said() if node.said] == [1.0, 1.0, 1.0]
    assert (episode.cause, episode.is_cut) == ("", False)
    (sample,) = episode.trace.samples()
    assert [chr(t) for t, mask in zip(sample.tokens, sample.is_trained, strict=True) if mask] == ["1", "2", "3"]
    assert (sample.turns, sample.rewards) == ([0, 1, 2], [1.0, 1.0, 1.0])


def test_the_prompt_of_a_turn_is_all_that_came_before_in_one_conversation() -> None:
    engine = ScriptedEngine(counting)
    play(engine, Count, PLAIN)
    prompts = ["".join(map(chr, request.prompt[1:])) for request in engine.requests]
    assert prompts == ["a:", "a:1<1>", "a:1<1>2<2>"]
    assert len({request.conversation for request in engine.requests}) == 1
    assert engine.forgotten == [engine.requests[0].conversation]
    numbers = [request.sample_ids[0] for request in engine.requests]
    assert numbers[0] == 100, "the first message is sampled as a response would be"
    assert len(set(numbers)) == 3, "noise differs from turn to turn"


def test_what_is_sampled_does_not_depend_on_delays() -> None:
    def requests(delay_s: float) -> set[tuple[tuple[int, ...], int]]:
        engine = ScriptedEngine(counting)
        play(engine, lambda: Count(delay_s), PLAIN, [{"text": name} for name in "abcdef"], concurrency=3)
        return {(tuple(request.prompt), request.sample_ids[0]) for request in engine.requests}

    assert requests(0.0) == requests(0.03)


def test_a_slow_environment_holds_up_only_its_own_episode() -> None:
    waiting: list[int] = []
    fast_are_done = asyncio.Event()

    class Slow(AsyncCount):
        async def act(self, text: str) -> Turn:  # type: ignore[override]
            turn = Count.act(self, text)
            if self.noise_of == "a":
                waiting.append(self.turn)
                await fast_are_done.wait()
            elif turn.done and len(engine.requests) >= 4 * 3 + 4:
                fast_are_done.set()
            return turn

        async def reset(self, task: Task, rng: Random) -> Observation:  # type: ignore[override]
            self.noise_of = task["text"]
            return Count.reset(self, task, rng)

    engine = ScriptedEngine(counting)
    episodes, _ = play(engine, Slow, PLAIN, [{"text": name} for name in "abababab"], act_timeout_s=20)
    assert not any(episode.cause for episode in episodes)
    assert waiting[:4] == [1] * 4, "all slow episodes wait in their first turn until the fast ones are over"


BAD_OBSERVATIONS = {"observation": 3, "image": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}


class Bad(Count):
    """Fails in a way that the task names."""

    def act(self, text: str) -> Turn:
        match self.how:
            case "raises":
                raise KeyError("lost")
            case "gives up":
                raise EpisodeFailed("the site is down")
            case "hangs":
                time.sleep(60)
            case "none":
                return None  # type: ignore[return-value]
            case "nan":
                return Turn("", reward=float("nan"))
            case "huge":
                return Turn("", reward=10**400)
            case "observation" | "image":
                return Turn(BAD_OBSERVATIONS[self.how])  # type: ignore[arg-type]
            case "agent":
                return Turn("", agent="nobody")
            case "times out by itself":
                raise TimeoutError("no route")
            case "info":
                return Turn("", info=None)  # type: ignore[arg-type]
            case "exits":
                raise SystemExit(3)
        return super().act(text)

    def reset(self, task: Task, rng: Random) -> Observation:
        self.how = task["text"]
        return super().reset(task, rng)


FAILURES = {
    "raises": ("environment", "Bad.act raised KeyError: 'lost'"),
    "gives up": ("environment", "Bad.act gave up: the site is down"),
    "hangs": ("deadline", "Bad.act has not answered within 1 s: raise environment.act_timeout_s"),
    "none": ("environment", "Bad.act returned NoneType: it must return a Turn"),
    "nan": ("environment", "Bad.act returned the reward nan: it must be a finite number"),
    "huge": ("environment", "it must be a finite number"),
    "observation": ("environment", "an observation must be a text"),
    "image": ("environment", "an observation holds an image, but the policy reads only text"),
    "agent": ("environment", "lets the agent 'nobody' act"),
    "times out by itself": ("environment", "Bad.act raised TimeoutError: no route"),
    "info": ("environment", "Bad.act returned the info None: it must be a dict of facts by name"),
    "exits": ("environment", "SystemExit: 3"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_counted_by_cause_and_harms_no_other_episode(how: str) -> None:
    cause, text = FAILURES[how]
    tasks, limit_s = [{"text": how}, {"text": "fine"}], 1.0 if how == "hangs" else 30.0
    (bad, good), _ = play(ScriptedEngine(counting), Bad, PLAIN, tasks, act_timeout_s=limit_s)
    assert bad.cause == cause
    assert text in bad.error
    assert not good.cause
    assert len(good.trace.said()) == 3


class Stubborn(AsyncCount):
    """Goes on after it was canceled, in the method that the task names; for ever, or for a while."""

    async def reset(self, task: Task, rng: Random) -> Observation:  # type: ignore[override]
        self.how = task["text"]
        return await super().reset(task, rng)

    async def act(self, text: str) -> Turn:  # type: ignore[override]
        if self.how in {"act", "act for a while"}:
            await self._go_on(60.0 if self.how == "act" else 1.5)
        return await super().act(text)

    async def close(self) -> None:  # type: ignore[override]
        if self.how == "close":
            await self._go_on(60.0)

    async def _go_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)


def test_what_goes_on_after_it_was_canceled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_functions, "GRACE_S", 0.3)
    engine, begin = ScriptedEngine(counting), time.monotonic()
    texts = ("act", "act for a while", "close", "fine")
    episodes, _ = play(engine, Stubborn, PLAIN, [{"text": text} for text in texts], act_timeout_s=0.5)
    assert time.monotonic() - begin < 20
    assert [episode.cause for episode in episodes] == ["deadline", "deadline", "", ""]
    for episode in episodes[:2]:
        assert episode.error.startswith("Stubborn.act goes on 0.3 s after its time limit, although it was canceled")
    assert [len(episode.trace.said()) for episode in episodes] == [1, 1, 3, 3]
    assert len(engine.requests) == 8, "nothing is asked for an episode that was left behind"
    assert len(set(engine.forgotten)) == 4


def test_a_constructor_has_a_time_limit_too_and_holds_up_no_other_episode() -> None:
    class Slow(Count):
        def __init__(self) -> None:
            super().__init__()
            if next(made) == 0:
                time.sleep(30)

    made, begin = iter(range(2)), time.monotonic()
    (bad, good), _ = play(ScriptedEngine(counting), Slow, PLAIN, [{"text": "a"}, {"text": "b"}], act_timeout_s=1.0)
    assert time.monotonic() - begin < 20
    assert (bad.cause, good.cause) == ("deadline", "")
    assert "the constructor of the environment has not answered within 1 s" in bad.error


def test_a_canceled_task_of_an_environment_costs_its_episode_only() -> None:
    class Canceling(AsyncCount):
        async def act(self, text: str) -> Turn:  # type: ignore[override]
            if self.noise_of == "bad":
                task = asyncio.ensure_future(asyncio.sleep(5))
                task.cancel()
                await task
            return await super().act(text)

        async def reset(self, task: Task, rng: Random) -> Observation:  # type: ignore[override]
            self.noise_of = task["text"]
            return await super().reset(task, rng)

    (bad, good), _ = play(ScriptedEngine(counting), Canceling, PLAIN, [{"text": "bad"}, {"text": "fine"}])
    assert (bad.cause, good.cause) == ("environment", "")
    assert "CancelledError" in bad.error


def test_a_failed_episode_is_tried_again_with_other_noise() -> None:
    failures = iter([True, True, False])

    class Flaky(Count):
        def act(self, text: str) -> Turn:
            if self.turn == 0 and next(failures):
                raise OSError("busy")
            return super().act(text)

    engine = ScriptedEngine(counting)
    (episode,), _ = play(engine, Flaky, PLAIN, max_attempts=3, failures={"environment": "retried"})
    assert (episode.cause, episode.attempts, len(episode.trace.said())) == ("", 3, 3)
    assert len({request.sample_ids[0] for request in engine.requests}) == len(engine.requests) == 5


def test_turns_and_tokens_are_limited() -> None:
    (episode,), _ = play(ScriptedEngine(counting), Count, PLAIN, max_turns=2)
    assert (text_of(episode), episode.is_cut) == ("a:1<1>2", True)
    (episode,), _ = play(ScriptedEngine(counting), Count, PLAIN, max_tokens=7)
    assert (text_of(episode), episode.is_cut) == ("a:1<1>", True), "no room is left for another token"
    ((kind, error, _),) = episode.failures
    assert (kind, episode.cause) == ("policy", ""), "its own failure, which does not end the episode as one of others"
    assert "7 tokens, and may have 7 (data.max_prompt_tokens + environment.max_episode_tokens)" in error
    (episode,), _ = play(ScriptedEngine(counting), Count, PLAIN, max_tokens=2)
    assert episode.cause == "environment", "the policy could not say anything"
    (episode,), _ = play(ScriptedEngine(lambda _: [5] * 30), Count, PLAIN, max_tokens=9)
    assert episode.trace.said()[0].said is not None
    assert len(episode.trace.said()[0].tokens) == 6, "a response gets the room that is left"


class Pair(Environment):
    """Two agents: the first one's word reaches the second, and both are rewarded at the end."""

    agents = ("planner", "solver")

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        self.heard = ""
        return "plan:"

    def act(self, text: str) -> Turn:
        if not self.heard:
            self.heard = text
            return Turn(f"solve {text}:", agent="solver")
        return Turn(reward={"planner": 0.5, "solver": 2.0}, done=True)


def test_agents_have_conversations_of_their_own_and_their_own_rewards() -> None:
    engine = ScriptedEngine(lambda _: [ord("p") if len(engine.requests) == 1 else ord("s")])
    (episode,), _ = play(engine, Pair, PLAIN)
    planner, solver = episode.trace.samples()
    assert ["".join(map(chr, sample.tokens[1:])) for sample in (planner, solver)] == ["plan:p", "solve p:s"]
    assert [(s.agent, s.turns, s.rewards) for s in (planner, solver)] == [
        ("planner", [0], [0.5]),
        ("solver", [1], [2.0]),
    ]
    assert len(set(engine.forgotten)) == 2


def test_an_engine_that_fails_ends_the_rollout() -> None:
    class Broken(ScriptedEngine):
        def step(self) -> list:  # type: ignore[type-arg]
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        play(Broken(counting), Count, PLAIN)
