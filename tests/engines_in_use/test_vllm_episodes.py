"""Episodes in which vLLM generates: programs in processes of their own, and tools of servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from tests.end_to_end.cli import ROOT
from tests.engines_in_use.test_vllm_runs import PYTHON, SERVER, train

from leaderless import Environment, Turn
from leaderless.environments.tools import Call, ToolCalls

pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make test-vllm` runs this with vLLM")
SETTINGS = {**SERVER, "reward": {}, "steps": 2, "batch.micro_batch_tokens": 128}
NUM_TURNS = 3


class Silent(Environment):
    """Everything that the policy says is a call of a tool, until the episode is cut."""

    def reset(self, task: Mapping[str, object], rng: Random) -> str:  # noqa: ARG002
        return "go"

    def act(self, text: str) -> Turn:
        raise AssertionError(f"a message without a call: {text}")


def call_anyway(text: str) -> ToolCalls:
    """Read any text as a call."""
    return ToolCalls(text, [Call("count", {"by": 2})])


@pytest.mark.timeout(900)
def test_a_program_asks_vllm_and_is_trained_on_what_was_sampled(tmp_path: Path) -> None:
    options = {"command": [sys.executable, str(ROOT / "examples/agent_program/agent.py")]}
    played = {"type": "command", "options": options, "max_episode_tokens": 96}
    for numbers in train(tmp_path, {**SETTINGS, "environment": played}, 1):
        assert numbers["episode/failed"] == 0
        assert (numbers["episode/turns"], numbers["episode/samples"]) == (2, 1)
        assert numbers["mismatch/abs_max"] < 1e-4


@pytest.mark.timeout(900)
def test_a_server_of_tools_answers_what_vllm_says(tmp_path: Path) -> None:
    server = {"command": [sys.executable, str(ROOT / "tests/unit/environments/mcp_server.py")], "start_timeout_s": 300}
    played = {
        "type": f"{__name__}:Silent",
        "mcp": {"counter": server},
        "tool_format": f"{__name__}:call_anyway",
        "max_turns": NUM_TURNS,
        "max_episode_tokens": 96,
    }
    for numbers in train(tmp_path, {**SETTINGS, "environment": played}, 1):
        assert (numbers["episode/failed"], numbers["episode/turns"]) == (0, NUM_TURNS)
        assert numbers["tool/calls"] == NUM_TURNS - 1, "the last message is not answered"
        assert numbers["tool/misread"] == 0
        assert numbers["mismatch/abs_max"] < 1e-4
