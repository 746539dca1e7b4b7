"""Episodes in which the policy calls tools, in this process and in processes of their own."""

from __future__ import annotations

import json

import pytest
import torch
from tests.rows import Characters
from tests.templates import CHATML, tokenizer_with
from tests.unit.environments.scripted import ScriptedEngine
from tests.unit.recipes import make_recipe

from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch
from leaderless.observability.known_metrics import known_metric
from leaderless.observability.metrics import Metrics
from leaderless.planner.workflow.builtin_stages import _rollout_metrics
from leaderless.stages.episode_rollout import play_tasks, tools_of
from leaderless.stages.episode_samples import Play, Played

HERE = "tests.unit.environments.sums"


class Plain(Characters):
    all_special_tokens = ()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(messages: list[str], template: str | None = None, **settings: object) -> Played:
    """What becomes of an episode in which the policy says some messages."""
    recipe = make_recipe(
        environment={
            "type": f"{HERE}:Sums",
            "tools": [f"{HERE}:{name}" for name in ("flood", "grumble", "hang", "crash")],
            "tool_format": "auto" if template else "hermes",
            "max_turns": 5,
        }
        | settings,
        data={"train": {"path": "rows.jsonl", "template": "chat" if template else "plain"}},
        rollout={"max_response_tokens": 400},
    )
    tokenizer = tokenizer_with(template) if template else Plain()
    said = iter(messages)
    engine = ScriptedEngine(lambda _: tokenizer.encode(next(said), add_special_tokens=False))
    tasks = Batch(torch.tensor([7]), {"rows": ({},)})
    play = Play([SamplingConfig()], 0, 10, 5)
    return play_tasks(engine, play, tasks, [recipe.data.train], recipe, tokenizer, lambda _: None)  # type: ignore[arg-type]


def told(found: Played) -> list[str]:
    nodes = found.episodes[0].trace.nodes
    return [str(message["content"]) for node in nodes[1:] if not node.said for message in node.messages]


both = pytest.mark.parametrize("isolation", ["thread", "process"])


@both
def test_calls_are_answered_before_the_environment_acts(isolation: str) -> None:
    two = call("count", by=2)
    found = played([two, f"{two}{call('count', by='x')}{call('cont', by=3)}", "4"], isolation=isolation)
    (episode,) = found.episodes
    assert (episode.cause, episode.error, episode.is_cut) == ("", "", False)
    first, second, wrong, unknown = told(found)
    assert (first, second) == ("2", "4")
    assert "argument 'by' = \"x\": Input should be a valid integer" in wrong
    assert "There is no tool 'cont' (did you mean 'count'?)" in unknown
    assert [node.said.reward for node in episode.trace.said() if node.said] == [0.0, 0.0, 1.0]
    assert [result.refusal for result in episode.calls] == [None, None, "wrong_arguments", "unknown_tool"]
    assert episode.trace.said()[0].messages[0]["tool_calls"] is not None
    (sample,) = episode.trace.samples()
    trained = "".join(chr(t) for t, mask in zip(sample.tokens, sample.is_trained, strict=True) if mask)
    assert trained.endswith(f"{call('cont', by=3)}4"), "what was sampled is trained, and nothing else"
    assert len(trained) == sum(sample.is_trained) < len(sample.tokens)


def test_the_policy_sees_tools_and_results_as_its_template_writes_them() -> None:
    found = played([f"{call('count', by=2)}<|im_end|>", "2<|im_end|>"], CHATML)
    (episode,) = found.episodes
    tokenizer = tokenizer_with(CHATML)
    text = tokenizer.decode(episode.trace.leaves()[0].context())
    assert '"name": "count"' in text.partition("Count:")[0]
    answer = "<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    assert text.endswith(call("count", by=2) + answer)
    assert episode.trace.said()[1].said.reward == 1.0  # type: ignore[union-attr]


@both
def test_a_result_is_cut_and_a_call_that_cannot_be_read_is_answered(isolation: str) -> None:
    found = played(
        [call("flood"), call("grumble"), "<tool_call>oops", "0"],
        isolation=isolation,
        max_result_characters=10,
        max_episode_tokens=4000,
    )
    long, refused, unread = told(found)
    assert refused == "Error\n[... 997 characters left out ...]\nxxxxx"
    assert long == "xxxxx\n[... 9,999,990 characters left out ...]\nxxxxx"
    assert len(unread) < 100
    assert [call.refusal for call in found.episodes[0].calls] == [None, "tool_error", "malformed"]


@both
def test_a_tool_that_hangs_fails_its_episode(isolation: str) -> None:
    (episode,) = played([call("hang")], isolation=isolation, tool_timeout_s=0.3).episodes
    assert episode.cause == "deadline"
    assert "the tool 'hang' took more than 0.3 s (environment.tool_timeout_s)" in episode.error


def test_a_tool_that_crashes_fails_its_episode_in_a_process_of_its_own() -> None:
    (episode,) = played([call("crash")], isolation="process").episodes
    assert (episode.cause, episode.error) == (
        "environment",
        "the environment's process has ended with the signal SIGABRT during 'tool'",
    )


def test_calls_at_the_last_turn_are_not_answered() -> None:
    found = played([call("count", by=1)] * 2, max_turns=2)
    assert found.episodes[0].is_cut
    assert told(found) == ["1"]


def test_metrics_say_which_tools_were_called() -> None:
    found = played([call("count", by=1) + call("count", by="x") + "<tool_call>oops", "1"])
    metrics = Metrics()
    found.report(metrics, 1, 1.0)
    numbers = {name: measure.total / max(1, measure.count) for name, measure in metrics._measures.items()}
    assert numbers["tool/calls"] == 3
    assert numbers["tool/misread"] == 1 / 3
    assert numbers["tool/calls/count"] == 2
    assert numbers["tool/refused/count"] == 0.5
    assert numbers["tool/calls/hang"] == 0
    assert all(known_metric(name) for name in metrics._measures)
    declared = _rollout_metrics(make_recipe(environment={"type": f"{HERE}:Sums"}), None)  # type: ignore[arg-type]
    assert {"tool/calls", "tool/calls/count", "tool/refused/count", "episode/tools_s"} <= {*declared}


def test_tools_are_made_once_for_all_steps() -> None:
    recipe = make_recipe(
        environment={"type": f"{HERE}:Sums", "tool_format": "hermes"},
        data={"train": {"path": "x", "template": "plain"}},
    )
    assert tools_of(recipe, Plain()) is tools_of(recipe, Plain())  # type: ignore[arg-type]
    assert tools_of(make_recipe(), Plain()) is None  # type: ignore[arg-type]
