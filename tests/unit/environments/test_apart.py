"""An episode in a process of its own: what crashes, hangs, forks or uses global random numbers harms nobody else."""

from __future__ import annotations

import os
import sys

import pytest
from tests.unit.environments.scripted import ScriptedEngine
from tests.unit.environments.test_player import PLAIN, counting

from leaderless.config.environment import EnvironmentConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.environments import remote
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.player import play_all
from leaderless.environments.registry import world_maker
from leaderless.rollout.engine import SamplingParams


def play(*texts: str, seed: str = "1", options: dict[str, int] | None = None) -> list[Episode]:
    limit_s, name = 2.0 if "hang" in texts else 30.0, "tests.unit.environments.wild:Wild"
    config = EnvironmentConfig.model_validate(
        {"type": name, "act_timeout_s": limit_s, "options": options or {}, "concurrency": 4}
    )
    params = SamplingParams(SamplingConfig(), 8, (), 5)
    places = [EpisodePosition(n, seed, {"text": text}, PLAIN, params) for n, text in enumerate(texts)]
    episodes, _ = play_all(ScriptedEngine(counting), config, world_maker(config), places, 200, lambda _: None)
    return episodes


def told(episode: Episode) -> str:
    return "|".join(str(m["content"]) for node in episode.trace.nodes if not node.said for m in node.messages)


def test_global_random_numbers_follow_from_the_seed_whatever_else_is_played() -> None:
    together = [told(episode) for episode in play("a", "b", "c", "d", "e", "f")]
    assert len(set(together)) == 1, "episodes of one seed see the same numbers"
    assert together[0] == told(play("a")[0])
    assert told(play("a", seed="2")[0]) != together[0]


def test_each_episode_has_a_process_of_its_own_that_ends_with_it() -> None:
    first, second = (told(episode).rpartition(" in ")[2].rstrip(">") for episode in play("pid", "pid"))
    assert first != second
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


FAILURES = {
    "crash": ("environment", "the environment's process has ended with the signal SIGSEGV during 'act'"),
    "exit": ("environment", "the environment's process has ended with exit code 7 during 'act'"),
    "hang": ("deadline", "Wild.act has not answered within 2 s"),
    "set": ("environment", "what 'act' returned cannot be sent to the player"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_process_that_fails_costs_its_episode_only(how: str) -> None:
    cause, text = FAILURES[how]
    bad, good = play(how, "fine")
    assert (bad.cause, good.cause) == (cause, "")
    assert text in bad.error


def test_a_copy_that_an_environment_forks_does_not_answer() -> None:
    (episode,) = play("fork")
    assert (episode.cause, len(episode.trace.said())) == ("", 3)


def test_a_process_that_does_not_even_report_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "GRACE_S", -1.0)
    (episode,) = play("hang")
    assert episode.cause == "deadline"
    assert "process has not answered 'act' within 1 s, and was ended" in episode.error


def test_options_reach_the_constructor_there() -> None:
    assert told(play("a", options={"sides": 1})[0]).startswith("0:|")


def test_processes_import_no_torch() -> None:
    names = "leaderless.Chat, leaderless.AskRefusedError, leaderless.Environment"
    program = f"import sys, leaderless.environments.remote; {names}; assert 'torch' not in sys.modules"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program]) == 0
