"""The interpreter as a tool of episodes."""

from __future__ import annotations

from contextlib import suppress

import psutil
import pytest
from tests.unit.environments.test_tool_episodes import both, call, played, told
from tests.unit.rewards.sandbox.boxes import boxes

from leaderless.config import RecipeError
from leaderless.rewards.sandbox.sandboxes import Sandbox


def processes() -> set[int]:
    """Processes of this test, without servers that the package keeps and without what has ended."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too, whose parent has not asked for it yet
            if "sandbox.supervisor" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


@pytest.mark.parametrize("box", boxes())
@both
def test_an_episode_keeps_its_variables_and_ends_its_interpreter(isolation: str, box: Sandbox) -> None:
    before = processes()
    says = [
        call("python", code="x = 20\nprint(len('abc'))"),
        call("python", code="x + 1"),
        call("python", code="y"),
        "0",
    ]
    found = played(says, tools=[{"type": "python", "options": {"sandbox": box.name}}], isolation=isolation)
    (episode,) = found.episodes
    assert not episode.error
    assert [result.text for result in episode.calls[:2]] == ["3", "21"]
    assert episode.calls[2].text.endswith("NameError: name 'y' is not defined")
    assert [text.endswith(result.text) for text, result in zip(told(found), episode.calls, strict=True)] == [True] * 3
    assert processes() <= before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sandbox": "docker"}, "sandbox='docker' must be auto, builtin or bubblewrap"),
        ({"sandbox": ["builtin"]}, "unhashable type: 'list'"),
        ({"patience": 3}, r"PythonTool\(.* does not take them"),
        ({"sandbox": ["bwrap"]}, r"PythonTool\(.* does not take them: unhashable type"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_run(options: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=rf"environment\.tools\.0.*{words}"):
        played([], tools=[{"type": "python", "options": options}])
