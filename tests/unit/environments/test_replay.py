"""Episodes as lines of a journal, and what is found when they are played again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

import pytest
from tests.unit.environments import sums
from tests.unit.environments.scripted import Count, ScriptedEngine, play
from tests.unit.environments.test_player import PLAIN, Bad, Pair, counting
from tests.unit.environments.test_tool_episodes import call, played

from leaderless.config import LoadedRecipe
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.guarded_environment import GuardedEnvironment, ThreadEnvironment
from leaderless.environments.journal import JournalDifference, Line, episode_of, first_difference, line_of, text_of
from leaderless.environments.player import play_all
from leaderless.environments.programs.chat import Chat
from leaderless.environments.protocol import ONLY_AGENT, Environment, Observation, Task, Turn
from leaderless.environments.registry import world_maker
from leaderless.environments.replay import replay
from leaderless.observability.episode_files import EpisodeFile
from leaderless.rollout.engine import SamplingParams
from leaderless.run.episodes import RunEpisodes


def journaled(make: Callable[[], Environment], text: str = "a", **settings: object) -> tuple[Episode, Line]:
    """An episode, and its line as it is read from a file."""
    (episode,), _ = play(ScriptedEngine(counting), make, PLAIN, [{"text": text}], **settings)
    return episode, json.loads(text_of(line_of(episode)))


def again(line: Line, make: Callable[[], Environment] | None, **settings: object) -> JournalDifference | None:
    config = EnvironmentConfig.model_validate({"type": "tests.unit.environments.scripted:Count", **settings})

    def place_of(line: Line) -> EpisodePosition:
        task = line["task"]
        assert isinstance(task, Mapping)
        return EpisodePosition(100, str(line["seed"]), task, PLAIN, SamplingParams(SamplingConfig(), 8))

    def open_world() -> GuardedEnvironment:
        assert make is not None
        return ThreadEnvironment(make, config.act_timeout_s, getattr(make, "agents", (ONLY_AGENT,)))

    ((_, difference),) = replay([line], config, open_world if make else None, place_of, 100)
    return difference


@pytest.mark.parametrize("make", [Count, Pair])
def test_a_line_holds_the_whole_episode(make: type[Environment]) -> None:
    episode, line = journaled(make)
    same = episode_of(line)
    # What could have been drawn is not in the line: a run with truncated sampling is not followed.
    assert list(same.trace.samples()) == [replace(one, support=[]) for one in episode.trace.samples()]
    assert [answer.turn for answer in same.answers] == [answer.turn for answer in episode.answers]
    assert (same.agents, same.cause, same.info) == (episode.agents, episode.cause, episode.info)
    assert again(line, make) is None
    assert again(line, None) is None


def test_log_probs_have_the_digits_of_a_float32() -> None:
    episode, _ = journaled(Count)
    said = episode.trace.said()[0].said
    assert said is not None
    said.log_probs = [-0.10000000149011612, -1.4012984643248171e-45, -123456.7890625]
    (values,) = (node["said"]["log_probs"] for node in line_of(episode)["nodes"] if node["parent"] == 0)  # type: ignore[index,union-attr,call-overload]
    assert values == [-0.1, -1e-45, -123456.79]


@pytest.mark.parametrize("how", ["raises", "gives up", "none", "observation", "agent"])
def test_failures_are_played_again(how: str) -> None:
    _, line = journaled(Bad, how)
    assert line["cause"] == "environment"
    assert again(line, Bad) is None
    assert again(line, None) is None


def test_an_episode_that_a_time_limit_ended_is_played_up_to_there() -> None:
    _, line = journaled(Bad, "hangs", act_timeout_s=0.5)
    assert line["cause"] == "deadline"
    assert again(line, Bad) is None, "at once, without the wait"
    assert again(line, Count) is None, "nobody knows what the answer would have been"


class Other(Count):
    """Differs from `Count` in one way, given by the task."""

    def reset(self, task: Task, rng: Random) -> Observation:
        self.way = task["text"]
        said = super().reset(task, rng)
        return "other" if self.way == "begin" else said

    def act(self, text: str) -> Turn:
        turn = super().act(text)
        match self.way:
            case "told" if self.turn == 2:
                return Turn("<two>", turn.reward, turn.done)
            case "reward" if self.turn == 2:
                return Turn(turn.observation, -1.0, turn.done)
            case "longer":
                return Turn(turn.observation, turn.reward, done=self.turn == 4)
            case "shorter" if self.turn == 2:
                return Turn(turn.observation, turn.reward, done=True)
            case "raises" if self.turn == 3:
                raise ValueError("no more")
        return turn


@pytest.mark.parametrize(
    ("way", "place", "expected", "found"),
    [
        ("begin", "first observation", "begin:", "other"),
        ("told", "answer of the environment to turn 2", "<2>", "<two>"),
        ("reward", "answer of the environment to turn 2, reward", "1.0", "-1.0"),
        ("longer", "answer of the environment to turn 3, done", "true", "false"),
        ("shorter", "answer of the environment to turn 2, done", "false", "true"),
        ("raises", "end of the episode, error", "", "Other.act raised ValueError: no more"),
    ],
)
def test_the_first_difference_is_found(way: str, place: str, expected: str, found: str) -> None:
    _, line = journaled(Count, way)
    assert again(line, Other) == JournalDifference(place, expected, found)


def test_how_a_message_came_to_be_said_makes_no_difference() -> None:
    _, line = journaled(Count)
    other = json.loads(text_of(line))
    for node in other["nodes"]:
        if node["said"]:
            node["said"] |= {"is_repeated": True, "temperature": 0.0}
    assert first_difference(line, other) is None


def test_a_difference_in_a_long_text_is_shown_where_it_begins() -> None:
    _, line = journaled(Count)
    other = json.loads(text_of(line))
    line["answers"][1]["observation"], other["answers"][1]["observation"] = "x" * 500 + "a", "x" * 500 + "b"  # type: ignore[index,call-overload]
    difference = first_difference(line, other)
    assert difference is not None
    assert difference.expected == "…" + "x" * 40 + "a"
    assert difference.found == "…" + "x" * 40 + "b"


def test_a_damaged_line_is_named() -> None:
    _, line = journaled(Count)
    with pytest.raises(ValueError, match="episode 100 of the journal is damaged"):
        episode_of({**line, "nodes": [{"parent": 5}]})


async def ask_twice(task: Task, chat: Chat) -> float:
    """Two questions at once, and one that follows on the longer answer."""
    messages = [[{"role": "user", "content": f"{task['text']}{number}"}] for number in (1, 2)]
    both = await asyncio.gather(*(chat.ask(one) for one in messages))
    last = await chat.ask([*messages[0], {"role": "assistant", "content": both[0].content}, messages[1][0]])
    return float(len(last.content) + ASKED["bonus"])


ASKED = {"bonus": 0}


def test_an_episode_that_a_program_leads_is_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}:ask_twice"
    config = EnvironmentConfig.model_validate({"type": name})
    place = EpisodePosition(100, "5/0", {"text": "a"}, PLAIN, SamplingParams(SamplingConfig(), 8, (), 5))
    # The answer to the first question takes longer, so that the second is answered before it.
    engine = ScriptedEngine(lambda _: [ord("x")] * (3 if len(engine.requests) == 1 else 1))
    (episode,), _ = play_all(engine, config, world_maker(config), [place], 100, lambda _: None)
    line = json.loads(text_of(line_of(episode)))
    assert (line["cause"], len(episode.trace.said())) == ("", 3)

    def difference() -> JournalDifference | None:
        ((_, found),) = replay([line], config, world_maker(config), lambda _: place, 100)
        return found

    assert difference() is None
    monkeypatch.setitem(ASKED, "bonus", 1)
    assert difference() is not None
    with pytest.raises(ValueError, match="a program leads the episodes"):
        list(replay([line], config, None, lambda _: place, 100))


def test_tools_answer_from_the_journal_but_for_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = f"{call('count', by=2)}{call('flood')}{call('cont', by=3)}"
    found = played([mixed, call("count", by=3), "5"], max_result_characters=100)
    line = json.loads(text_of(line_of(found.episodes[0])))
    assert [one["refusal"] for one in line["calls"]] == [None, None, "unknown_tool", None]
    place = found.episodes[0].place
    assert place is not None
    assert found.tools is not None
    # A tool that is called would raise; the environment's own is called.
    monkeypatch.setattr(sums.flood, "__code__", (lambda: 1 / 0).__code__)
    config = EnvironmentConfig.model_validate(
        {"type": f"{sums.__name__}:Sums", "tools": [f"{sums.__name__}:flood"], "max_result_characters": 100}
    )

    def difference(*, has_environment: bool = True) -> JournalDifference | None:
        make = world_maker(config) if has_environment else None
        ((_, one),) = replay([line], config, make, lambda _: place, 10_000, found.tools)
        return one

    assert difference() is None
    monkeypatch.setattr(sums.Sums.count, "__code__", (lambda _, by: -by).__code__)
    assert difference(has_environment=False) is None
    changed = difference()
    assert changed is not None
    assert changed.place == "what is told before turn 2, messages"


def test_an_episode_of_several_nodes_is_the_line_of_the_last(tmp_path: Path) -> None:
    """The failure of a later node counts, even if it has played fewer turns than the one before it."""
    lines = {
        "first": [{"id": 1, "cause": "", "nodes": [1, 2, 3]}, {"id": 2, "cause": "", "nodes": [1]}],
        "second": [{"id": 1, "cause": "crash", "nodes": [1]}, {"id": 2, "cause": "", "nodes": [1, 2]}],
    }
    files: list[EpisodeFile] = []
    for rank, (name, some) in enumerate(reversed(lines.items())):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in some))
        files.append(EpisodeFile("step", 3, "played", rank, path))
    found = RunEpisodes(cast("LoadedRecipe", None), files).played("step", 3)
    assert found == lines["second"]
