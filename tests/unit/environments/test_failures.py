"""Failures of episodes, caused for real: their kinds, what is done about each, and that no other episode suffers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tests.unit.environments.breaks import ask
from tests.unit.environments.scripted import ScriptedEngine
from tests.unit.environments.test_tool_episodes import Plain, call
from tests.unit.recipes import make_recipe

from leaderless import EpisodeFailed
from leaderless.config.failures import FAILURE_FACTS, FAILURE_KINDS, FailuresConfig, rules_of
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import SIBLING_BITS, Batch
from leaderless.distributed.transport import ProcessGroup
from leaderless.environments.guarded_environment import failure_of, kind_of_end
from leaderless.environments.journal import episode_of
from leaderless.observability.known_metrics import known_metric
from leaderless.observability.metrics import Metrics
from leaderless.rollout.engine import Request
from leaderless.stages.episode_rollout import play_tasks
from leaderless.stages.episode_samples import Play, Played

HERE = "tests.unit.environments.breaks"
ROOT = Path(__file__).parents[3]
SIBLINGS = 3


def played(how: str, script: Callable[[int], Sequence[str]], **settings: object) -> Played:
    """Two tasks of three episodes each; a script says what is said in a try of an episode, by its first request."""
    made = make_recipe(
        environment={"type": f"{HERE}:Breaks", "tool_format": "hermes", "max_turns": 6, "act_timeout_s": 20} | settings,
        data={"train": {"path": "rows.jsonl", "template": "plain"}, "max_prompt_tokens": 40},
        rollout={"max_response_tokens": 400},
    )
    tokenizer = Plain()
    left: dict[int, list[str]] = {}

    def say(request: Request) -> list[int]:
        conversation = request.conversation
        if conversation not in left:
            left[conversation] = list(script(request.sample_ids[0]))
        return tokenizer.encode(left[conversation].pop(0), add_special_tokens=False)

    tasks = Batch(torch.tensor([7, 8]), {"rows": ({"how": how}, {"how": how})})
    play = Play([SamplingConfig()] * SIBLINGS, 0, 10, 5)
    data = [made.data.train] * 2
    engine = ScriptedEngine(say)
    return play_tasks(engine, play, tasks, data, made, tokenizer, lambda _: None)  # type: ignore[arg-type]


def first_breaks(*messages: str, is_stubborn: bool = False) -> Callable[[int], Sequence[str]]:
    """The first episode says some messages, in its first try or in all; every other one is right at once."""
    first, *others = ((task << SIBLING_BITS) + place for task in (7, 8) for place in range(SIBLINGS))
    return lambda number: messages if number == first or (is_stubborn and number not in others) else ["1"]


def numbers_of(found: Played) -> dict[str, float]:
    metrics = Metrics()
    found.report(metrics, 1, 1.0)
    return metrics.reduce(ProcessGroup((0,), 0))


def check(found: Played, kind: str, *, is_absent: bool, attempts: int = 1, text: str = "") -> None:
    """The first episode has met a failure of a kind, all others none; and only an absent one carries no gradient."""
    first, *others = found.episodes
    assert {one.kind for one in first.failures} == {kind}
    assert text in first.failures[0].error
    assert (first.cause, first.attempts) == (kind if is_absent else "", attempts)
    assert first.error == (first.failures[-1].error if is_absent else "")
    for one in others:
        assert (one.cause, one.failures, one.attempts) == ("", [], 1)
        assert one.trace.said()[-1].said.reward == 0.75  # type: ignore[union-attr]
    samples = found.samples()
    lengths = samples.dense("response_lengths").tolist()
    assert [length > 0 for length in lengths] == [not is_absent, *[True] * 5]
    failures = samples.objects("environment_failed")
    assert failures == (({"cause": kind, "error": first.error} if is_absent else None), *[None] * 5)
    numbers = numbers_of(found)
    shares = {name: numbers[f"failure/{name}"] for name in FAILURE_KINDS if name != "grader"}
    assert shares == {name: pytest.approx(1 / 6 if name == kind else 0.0) for name in shares}
    assert numbers["episode/failed"] == float(is_absent)
    assert numbers["episode/repeated"] == attempts - 1
    assert found.first_failures() == {kind: first.failures[0].error}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def gone() -> str:
    """Address of a real HTTP server that has answered once, and was killed then."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], stderr=subprocess.PIPE, text=True
    ) as server:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            try:
                server.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError("the server has not started")
        server.kill()
    return f"http://127.0.0.1:{port}/"


def test_an_environment_that_raises_is_absent_and_is_not_tried_again() -> None:
    check(played("raises", first_breaks("!")), "environment", is_absent=True, text="raised ValueError: no more")


def test_a_rule_may_be_changed_for_one_kind() -> None:
    rules = {"failures": {"environment": "retried"}}
    check(played("raises", first_breaks("!"), **rules), "environment", is_absent=False, attempts=2)
    found = played("raises", first_breaks("!", is_stubborn=True), **rules, max_attempts=2)
    check(found, "environment", is_absent=True, attempts=2)
    assert [one.attempt for one in found.episodes[0].failures] == [0, 1]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_tool_that_raises_is_told_and_the_episode_goes_on(isolation: str) -> None:
    found = played("x", first_breaks(call("broken"), "1"), isolation=isolation)
    check(found, "tool", is_absent=False, text="the tool 'broken' raised KeyError: 'no such row'")
    episode = found.episodes[0]
    assert [(one.refusal, one.kind, one.text) for one in episode.calls] == [
        ("failed", "tool", "Error: the tool 'broken' raised KeyError: 'no such row'")
    ]
    assert episode.trace.said()[-1].said.reward == 0.75  # type: ignore[union-attr]
    told = [message["content"] for node in episode.trace.nodes[1:] if not node.said for message in node.messages]
    assert told == [episode.calls[0].text]
    assert numbers_of(found)["tool/refused/broken"] == 0.0, "which counts what a tool refuses"


def test_a_tool_may_also_end_its_episode_or_begin_it_anew() -> None:
    script = first_breaks(call("broken"), "1")
    check(played("x", script, failures={"tool": "absent"}), "tool", is_absent=True)
    check(
        played("x", first_breaks(call("broken"), "1"), failures={"tool": "retried"}),
        "tool",
        is_absent=False,
        attempts=2,
    )


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_late_answer_is_a_deadline(isolation: str) -> None:
    found = played("hangs", first_breaks("!"), act_timeout_s=1, isolation=isolation)
    check(found, "deadline", is_absent=True, text="has not answered within 1 s")
    found = played("x", first_breaks(call("hang"), "1"), tool_timeout_s=1, isolation=isolation)
    check(found, "deadline", is_absent=True, text="the tool 'hang' took more than 1 s")
    rules = {"failures": {"deadline": "retried"}}
    check(played("x", first_breaks(call("hang")), tool_timeout_s=1, **rules), "deadline", is_absent=False, attempts=2)


def test_a_server_that_is_gone_is_infrastructure_and_tried_again(gone: str) -> None:
    found = played(f"asks {gone}", first_breaks("!"))
    check(found, "infrastructure", is_absent=False, attempts=2, text="Connection refused")
    found = played(f"asks {gone}", first_breaks("!", is_stubborn=True))
    check(found, "infrastructure", is_absent=True, attempts=3, text="Connection refused")
    found = played(gone, first_breaks(call("unreachable"), "1"))
    check(found, "infrastructure", is_absent=False, attempts=2, text="the tool 'unreachable' raised URLError")
    check(played("site", first_breaks("!")), "infrastructure", is_absent=False, attempts=2, text="the site is down")


def test_a_process_that_is_killed_is_infrastructure_and_one_that_ends_is_the_environments() -> None:
    found = played("killed", first_breaks("!"), isolation="process")
    check(found, "infrastructure", is_absent=False, attempts=2, text="the signal SIGKILL")
    found = played("ends", first_breaks("!"), isolation="process")
    check(found, "environment", is_absent=True, text="exit code 3")
    assert kind_of_end(137) == "infrastructure"
    assert kind_of_end(-signal.SIGSEGV) == "environment"


SANDBOXED = [
    call("python", code="x = 1"),
    call("kill_sandboxes"),
    call("python", code="x"),
    call("python", code="2"),
    "1",
]


def test_a_sandbox_that_dies_is_its_own_kind() -> None:
    tools = {"tools": ["python"]}
    text = "the sandbox's supervisor ended with exit code -9"
    found = played("x", first_breaks(*SANDBOXED), **tools)
    check(found, "sandbox", is_absent=False, attempts=2, text=text)
    found = played("x", first_breaks(*SANDBOXED), **tools, failures={"sandbox": "absent"})
    check(found, "sandbox", is_absent=True, text=text)
    found = played("x", first_breaks(*SANDBOXED), **tools, failures={"sandbox": "observation"})
    check(found, "sandbox", is_absent=False, text=text)
    results = [(one.kind, one.text) for one in found.episodes[0].calls]
    assert results[2][0] == "sandbox"
    assert text in results[2][1]
    assert results[3] == (None, "2"), "the next call has a new sandbox"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (["<tool_call>oops", "1"], "cannot be read"),
        ([call("brokn"), "1"], "There is no tool 'brokn'"),
        ([call("broken", x=1), "1"], "there is no argument 'x'"),
    ],
)
def test_what_the_policy_gets_wrong_is_its_own_and_is_trained(messages: list[str], text: str) -> None:
    found = played("x", first_breaks(*messages))
    check(found, "policy", is_absent=False, text=text)
    said = [node for node in found.episodes[0].trace.nodes if node.said]
    (sample,) = found.episodes[0].trace.samples()
    assert sum(sample.is_trained) == sum(len(node.tokens) for node in said), "the wrong call, too"


def test_a_conversation_that_is_used_up_is_the_policys_own_and_is_trained() -> None:
    found = played("talks", first_breaks("!"), max_episode_tokens=100)
    episode = found.episodes[0]
    assert (episode.cause, episode.is_cut) == ("", True)
    assert [one.kind for one in episode.failures] == ["policy"]
    samples = found.samples()
    assert samples.objects("environment_failed")[0] is None
    assert samples.dense("response_lengths")[0] > 0
    assert samples.dense("truncated")[0]


def test_errors_of_connections_are_known_in_libraries_that_have_their_own(gone: str) -> None:
    import httpx2
    import openai
    import requests

    def ask_openai() -> None:
        with openai.OpenAI(base_url=gone, api_key="x", max_retries=0) as client:
            client.models.list()

    asks = (partial(httpx2.get, gone), partial(requests.get, gone, timeout=5), ask_openai, partial(ask, gone))
    for asked in asks:
        with pytest.raises(Exception) as failed:  # noqa: PT011 - each library has its own
            asked()
        assert failure_of(failed.value, "f", "tool").kind == "infrastructure", failed.value
    assert failure_of(ConnectionResetError(), "f", "tool").kind == "infrastructure"
    assert failure_of(OSError("disk"), "f", "tool").kind == "tool"
    assert failure_of(TimeoutError("its own limit"), "f", "tool").kind == "tool"


def test_an_environment_cannot_blame_the_policy_or_a_grader() -> None:
    assert EpisodeFailed("x", "sandbox").kind == "sandbox"
    assert EpisodeFailed("x").kind is None
    for kind, remedy in (("policy", "return a reward"), ("grader", "a reward of the recipe"), ("x", "leave it out")):
        with pytest.raises(ValueError, match=remedy):
            EpisodeFailed("x", kind)  # type: ignore[arg-type]


WRONG = [
    ("policy", "absent", "leave it out; to keep episodes that are cut out of the gradient"),
    ("policy", "observation", "is its own"),
    ("environment", "observation", "only the policy's calls of tools have results"),
    ("environment", "trained", "would have to be invented"),
    ("tool", "deferred", "cannot be graded later"),
    ("grader", "observation", "set deferred or absent"),
    ("grader", "retried", "playing it again mends no reward"),
    ("deadline", "observation", "a time limit of its own that ends in a ToolError"),
    ("infrastructure", "deferred", "set retried or absent"),
    ("tool", "ignored", "'observation', 'absent' or 'retried'"),
]


@pytest.mark.parametrize(("kind", "rule", "remedy"), WRONG)
def test_a_rule_that_cannot_be_is_refused_with_the_remedy(kind: str, rule: str, remedy: str) -> None:
    environment = {"type": f"{HERE}:Breaks", "failures": {kind: rule}}
    with pytest.raises(ValidationError) as refused:
        make_recipe(environment=environment)
    (problem,) = refused.value.errors()
    assert problem["loc"] == ("environment", "failures", kind)
    assert remedy in problem["msg"]


def test_what_waits_for_its_grade_needs_a_journal() -> None:
    environment: dict[str, object] = {"type": f"{HERE}:Breaks"}
    assert make_recipe(environment=environment).defers_grades
    assert not make_recipe(environment=environment, run={"kept_episodes": 0}).defers_grades
    assert not make_recipe(environment=environment | {"failures": {"grader": "absent"}}).defers_grades
    assert not make_recipe().defers_grades
    environment["failures"] = {"grader": "deferred"}
    remedy = "set environment.failures.grader to absent, or run.kept_episodes to at least 1"
    with pytest.raises(ValidationError, match=remedy):
        make_recipe(environment=environment, run={"kept_episodes": 0})


def test_every_kind_has_its_facts_its_rules_and_its_metric() -> None:
    assert tuple(FAILURE_FACTS) == FAILURE_KINDS == tuple(FailuresConfig.model_fields)
    for kind in FAILURE_KINDS:
        default = FailuresConfig.model_fields[kind].default
        assert rules_of(kind)[0] == (default or "deferred")
        assert known_metric(f"failure/{kind}") is not None


def test_pages_have_the_table_of_kinds() -> None:
    page = (ROOT / "docs/concepts/episodes.md").read_text(encoding="utf-8")
    for kind, facts in FAILURE_FACTS.items():
        default, *others = (f"`{rule}`" for rule in rules_of(kind))
        row = f"| `{kind}` | {facts.meaning} | {default} | {', '.join(others) or '–'} | {facts.reason} |"
        assert row in page, row


def test_a_failure_is_written_as_json() -> None:
    found = played("raises", first_breaks("!"))
    first, *_ = map(json.loads, found.journal())
    note = {"kind": "environment", "error": found.episodes[0].error, "attempt": 0}
    assert (first["cause"], first["failures"]) == ("environment", [note])
    assert episode_of(first).failures == found.episodes[0].failures
    assert episode_of(first | {"cause": "timeout", "failures": []}).cause == "deadline", "of an earlier version"
