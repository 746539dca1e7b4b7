"""Outcomes of episodes that servers of verifiers have played, by their records; and the address that they ask at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tests.unit.environments.led import END, lead

from leaderless.environments.adapters.verifiers_outcome import outcome_of
from leaderless.environments.programs import Chat
from leaderless.environments.protocol import EpisodeFailed, Task

OURS = "name.key"
PARTLY = {"right": None, "short": SimpleNamespace(score=1.0, weight=1.0)}


def error(kind: str, status: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(type=kind, message="it broke", status_code=status)


def trace(**changes: Any) -> SimpleNamespace:
    """A trace of the policy, which went well."""
    facts: dict[str, Any] = {
        "agent": SimpleNamespace(name="agent", trainable=True, config=SimpleNamespace(model=OURS)),
        "errors": [],
        "is_timeout": False,
        "metrics": {"length": 3.0, "unknown": None},
        "ok": True,
        "rewards": {"right": SimpleNamespace(score=1.0, weight=0.5), "short": SimpleNamespace(score=2.0, weight=0.25)},
        "stop_condition": "agent_completed",
        "task": SimpleNamespace(type="SumTask"),
    }
    return SimpleNamespace(**(facts | changes))


def outcome(*traces: Any, is_cut: bool = False, **changes: Any) -> Any:
    episode = SimpleNamespace(**({"traces": traces, "errors": [], "ok": True, "is_timeout": False} | changes))
    return outcome_of(episode, OURS, is_cut=is_cut)


def test_the_reward_is_the_weighted_sum_and_its_parts_are_recorded() -> None:
    assert outcome(trace()) == {
        "reward": 1.0,
        "rewards": {"right": 1.0, "short": 2.0},
        "metrics": {"length": 3.0},
        "stop": "agent_completed",
    }


def test_agents_with_models_of_their_own_do_not_count() -> None:
    judge = SimpleNamespace(name="judge", trainable=False, config=SimpleNamespace(model="other"))
    assert outcome(trace(), trace(agent=judge, rewards={}))["reward"] == 1.0


@pytest.mark.parametrize(
    ("kind", "status", "wanted", "is_led_to"),
    [
        ("HarnessError", None, "environment", True),
        ("TaskError", None, "environment", False),
        ("ToolsetError", None, "tool", False),
        ("SandboxError", None, "sandbox", False),
        ("InterceptionError", None, "infrastructure", False),
        ("TunnelError", None, "infrastructure", False),
        ("ProviderError", 503, "infrastructure", False),
        ("ProviderError", 400, "environment", True),
        ("SomethingNewError", 400, "environment", False),
    ],
)
def test_an_error_has_a_kind_unless_a_limit_has_led_to_it(
    kind: str, status: int | None, wanted: str, is_led_to: bool
) -> None:
    failed = trace(ok=False, errors=[error("HarnessError"), error(kind, status)], rewards={"right": None})
    with pytest.raises(EpisodeFailed, match=f"verifiers: {kind}: it broke") as found:
        outcome(failed, ok=False)
    assert found.value.kind == wanted
    with pytest.raises(EpisodeFailed) as found:
        outcome(failed, ok=False, is_cut=True)
    assert found.value.kind == (None if is_led_to else wanted)


@pytest.mark.parametrize(
    ("traces", "changes", "kind", "words"),
    [
        (
            [trace(is_timeout=True, stop_condition="agent_timeout")],
            {},
            "deadline",
            "agent_timeout: raise env.agent.tim",
        ),
        ([trace()], {"is_timeout": True, "ok": False}, "deadline", "episode_timeout: raise env.timeout of the server"),
        ([], {"ok": False, "errors": [error("EnvError")]}, "environment", "EnvError: it broke"),
        ([], {"ok": False}, "environment", "without an error: see the log of the server"),
        ([trace(rewards={})], {}, "environment", "a task of type SumTask has no reward: give its class"),
        ([trace(rewards=PARTLY)], {}, "environment", "has no reward right: give its class"),
        ([trace(), trace()], {}, "environment", r"plays 2 agents of an episode \('agent', 'agent'\)"),
    ],
)
def test_what_is_not_one_reward_fails(traces: Sequence[Any], changes: dict[str, Any], kind: str, words: str) -> None:
    with pytest.raises(EpisodeFailed, match=words) as found:
        outcome(*traces, **changes)
    assert found.value.kind == kind


def test_the_model_names_an_episode_at_an_address_that_all_share() -> None:
    addresses: list[str] = []
    met = asyncio.Event()

    async def solve(task: Task, chat: Chat) -> float:
        addresses.append(chat.admission.shared_url)
        if len(addresses) == 2:
            met.set()
        await met.wait()
        async with openai.AsyncOpenAI(base_url=chat.admission.shared_url, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": task["text"]}]
            answer = await client.chat.completions.create(model=chat.admission.model, messages=messages)
            wrong = chat.admission.model[:-1] + ("a" if chat.admission.model[-1] != "a" else "b")
            for model in (wrong, "other", ""):
                with pytest.raises(openai.NotFoundError, match="is no episode that is played here"):
                    await client.chat.completions.create(model=model, messages=messages)
            with pytest.raises(openai.NotFoundError):
                await client.models.list()
        return float(answer.choices[0].message.content == task["text"])

    say = lambda context: ("one" if "one" in context else "two") + END  # noqa: E731
    episodes, _ = lead(solve, say, [{"text": "one"}, {"text": "two"}])
    assert [episode.error for episode in episodes] == ["", ""]
    assert [episode.trace.said()[-1].said.reward for episode in episodes] == [1.0, 1.0]
    assert addresses[0] == addresses[1]


def test_the_shared_address_is_that_of_the_step_before_unless_its_port_is_taken() -> None:
    addresses: list[str] = []

    async def solve(task: Task, chat: Chat) -> float:
        addresses.append(chat.admission.shared_url)
        await chat.ask("?")
        return 0.0

    for _ in range(2):
        assert not lead(solve)[0][0].error
    assert addresses[0] == addresses[1]

    async def holds(task: Task, chat: Chat) -> float:
        _ = chat.admission
        await asyncio.to_thread(lead, solve)
        return await solve(task, chat)

    assert not lead(holds)[0][0].error
    inner, own = addresses[2:]
    assert own == addresses[0]
    assert inner != own
