"""Episodes as rows: one per branch, with what credit and training need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import ClassVar

import pytest
import torch
from tests.rows import Characters
from tests.unit.environments.scripted import Count, ScriptedEngine
from tests.unit.environments.test_player import Bad, Pair, counting
from tests.unit.recipes import make_recipe, only_problem, plan_of

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.environments.protocol import Observation, Task
from leaderless.environments.registry import try_environment
from leaderless.observability.metrics import Metrics
from leaderless.rewards.pool import Graded
from leaderless.stages.episode_rollout import play_tasks
from leaderless.stages.episode_samples import Play, Played
from leaderless.stages.reward import with_environment

HERE = "tests.unit.environments"


class Tokenizer(Characters):
    all_special_tokens = ()


def played(texts: str, environment: type, siblings: int = 2, first: int = 0, script: object = counting) -> Played:
    name = f"{environment.__module__}:{environment.__name__}"
    recipe = make_recipe(
        environment={"type": name, "max_turns": 5, "act_timeout_s": 5},
        data={"train": {"path": "rows.jsonl", "template": "plain"}},
        rollout={"max_response_tokens": 4},
    )
    tasks = Batch(
        torch.arange(len(texts)) + 7,
        {
            "rows": tuple({"text": text} for text in texts),
            "prompt_tokens": Jagged.from_lists([[2]] * len(texts), torch.int64, "prompt_tokens"),
        },
    )
    play = Play([SamplingConfig()] * siblings, first, 10, 5)
    data = [recipe.data.train] * len(texts)
    engine = ScriptedEngine(script)  # type: ignore[arg-type]
    return play_tasks(engine, play, tasks, data, recipe, Tokenizer(), lambda _: None)  # type: ignore[arg-type]


class Unequal(Count):
    """Takes its time for one of two tasks."""

    def reset(self, task: Task, rng: Random) -> Observation:
        if isinstance(task, Mapping) and task["text"] == "a":
            time.sleep(1.0)
        return super().reset(task, rng)


def text_of(tokens: list[int]) -> str:
    return "".join("^" if token == 1 else chr(token) for token in tokens)


def test_a_task_has_one_prompt_and_an_episode_one_row() -> None:
    samples = played("ab", Count).samples()
    assert samples.ids.tolist() == [(7 << 16), (7 << 16) + 1, (8 << 16), (8 << 16) + 1]
    assert samples.prompts is not None
    assert [text_of(row) for row in samples.prompts.jagged("prompt_tokens").to_lists()] == ["^a:", "^b:"]
    assert [text_of(row) for row in samples.jagged("tokens").to_lists()] == ["1<1>2<2>3"] * 4
    masks = samples.jagged("response_mask").to_lists()
    assert masks[0] == [True, False, False, False] * 2 + [True]
    assert samples.jagged("turns").to_lists() == [[0, 1, 2]] * 4
    assert samples.jagged("turn_rewards").to_lists() == [[1.0] * 3] * 4
    assert samples.dense("environment_rewards").tolist() == [3.0] * 4
    assert samples.dense("episode_ids").tolist() == samples.dense("joint_ids").tolist() == samples.ids.tolist()
    assert samples.jagged("rollout_log_probs").to_lists() == [[-0.5] * 3] * 4
    assert samples.jagged("policy_versions").to_lists() == [[3] * 3] * 4


def test_agents_of_a_play_are_episodes_of_their_own() -> None:
    samples = played("a", Pair, siblings=2, first=4).samples()
    first = 7 << 16
    assert samples.ids.tolist() == [first + 4, first + 5, first + 14, first + 15], "one row for each agent"
    assert samples.dense("actor").tolist() == [0, 0, 1, 1]
    assert samples.dense("episode_ids").tolist() == samples.ids.tolist()
    assert samples.dense("joint_ids").tolist() == [first + 4, first + 5] * 2
    assert samples.dense("environment_rewards").tolist() == [0.5, 0.5, 2.0, 2.0]
    assert samples.jagged("turns").to_lists() == [[0], [0], [1], [1]]


def test_each_row_knows_how_long_its_episode_has_waited() -> None:
    made = played("ab", Unequal)
    assert [sample >> 16 for sample in made.samples().ids.tolist()] == [7, 7, 8, 8]
    assert [wait > 0.99 for wait in made.waits()] == [True, True, False, False]
    two_agents = played("a", Pair, siblings=2)
    assert len(two_agents.waits()) == len(two_agents.samples()) == 4


def test_the_prompt_of_a_task_is_what_all_its_conversations_begin_with() -> None:
    samples = played("a", Pair, siblings=1).samples()
    assert samples.jagged("prompt_tokens").to_lists() == [[1], [1]], (
        "^plan: and ^solve 1: have the first token in common"
    )
    rows = zip(samples.jagged("tokens").to_lists(), samples.jagged("response_mask").to_lists(), strict=True)
    assert [(text_of(tokens), mask) for tokens, mask in rows] == [
        ("plan:1", [False] * 5 + [True]),
        ("solve 1:2", [False] * 8 + [True]),
    ]


class Always(Bad):
    """Fails at once."""

    def reset(self, task: Task, rng: Random) -> Observation:
        super().reset(task, rng)
        self.how = "raises"
        return "?"


def test_a_failed_episode_is_an_empty_row_that_is_not_valid() -> None:
    samples = played("a", Always).samples()
    assert samples.dense("response_lengths").tolist() == [0, 0]
    assert samples.jagged("prompt_tokens").to_lists() == [[2], [2]]
    cause = samples.objects("environment_failed")[0]
    assert cause == {"cause": "environment", "error": "Always.act raised KeyError: 'lost'"}
    assert not with_environment(None, 0.0, cause).is_valid
    assert with_environment(Graded(1.0, is_valid=True, details={}), 0.5, None).value == 1.5
    assert not with_environment(Graded(0.0, is_valid=False, details={}), 0.5, None).is_valid


def test_an_episode_with_more_samples_than_ids_fails_by_itself() -> None:
    one = replace(played("a", Pair, siblings=2), play=Play([SamplingConfig()] * 2, 0, 1 << 15, 5))
    samples = one.samples()
    failures = samples.objects("environment_failed")
    assert len(failures) == 3, "the first episode has room for two samples, and the second one has not"
    assert failures[:1] + failures[2:] == (None, None)
    assert "has 2 conversations or branches, and ids have room for 1" in str(failures[1])


def test_metrics_are_means_over_whole_episodes() -> None:
    metrics = Metrics()
    played("ab", Count).report(metrics, 2, 1.0)
    numbers = metrics.reduce(ProcessGroup((0,), 0))
    assert numbers["episode/turns"] == 3.0
    assert numbers["episode/told_tokens"] == 3 + 2 * 3, "the prompt and two answers"
    assert numbers["episode/failed"] == numbers["episode/cut"] == 0.0
    assert numbers["rollout/response_tokens"] == 1.0
    metrics = Metrics()
    played("ab", Always).report(metrics, 2, 1.0)
    numbers = metrics.reduce(ProcessGroup((0,), 0))
    assert (numbers["episode/failed"], numbers["failure/environment"]) == (4.0, 1.0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": f"{HERE}.scripted:Count", "options": {"delay": 1}}, "Count.* does not take them"),
        ({"type": "no.such:Thing"}, "cannot be imported"),
        ({"type": "nothing"}, "unknown environment 'nothing'"),
        ({"type": f"{HERE}.scripted:ScriptedEngine"}, "must be a class derived from"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_before_the_run(section: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", environment=section)


class Slow(Count):
    def __init__(self) -> None:
        time.sleep(20)


class Counted(Count):
    events: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.events.append("made")

    def close(self) -> None:
        self.events.append("closed")


WILD = "tests.unit.environments.wild:Wild"
UNMADE = {
    "no pages": (
        {"type": "search_r1", "options": {"pages": "nowhere.jsonl"}},
        ("environment", "nowhere.jsonl"),
    ),
    "in a process": (
        {"type": WILD, "options": {"sides": 0}},
        ("environment", "the constructor of the environment raised ValueError: a die has sides"),
    ),
    "too slow": ({"type": f"{__name__}:Slow", "act_timeout_s": 0.1}, ("environment", "has not answered within 0.1 s")),
}


@pytest.mark.parametrize("case", UNMADE)
def test_an_environment_that_cannot_be_made_is_refused_before_the_run(case: str) -> None:
    section, (key, text) = UNMADE[case]
    with pytest.raises(RecipeError) as caught:
        try_environment(EnvironmentConfig.model_validate(section))
    problem = only_problem(caught.value)
    assert (problem.key, text in problem.message) == (key, True), problem


def test_a_good_environment_is_made_and_closed_also_where_an_event_loop_runs() -> None:
    async def notebook() -> None:
        try_environment(EnvironmentConfig(type=f"{__name__}:Counted"))

    Counted.events.clear()
    asyncio.run(notebook())
    assert Counted.events == ["made", "closed"]


def test_a_recipe_with_an_environment_is_planned_with_its_columns() -> None:
    plan = plan_of("grpo", environment=f"{HERE}.scripted:Count", reward={}, algorithm={"kl": {"coefficient": 0.1}})
    reads = {node.name: set(node.reads) for node in plan.nodes}
    assert "environment_rewards" in reads["reward"]
    assert "turn_rewards" in reads["advantage"]
    assert next(node.reads["prompt_tokens"] for node in plan.nodes if node.name == "policy") == "rollout"


def test_an_episode_must_fit_into_a_micro_batch() -> None:
    with pytest.raises(RecipeError, match=r"512 tokens \(data.max_prompt_tokens \+ environment.max_episode_tokens\)"):
        plan_of(
            "grpo",
            environment={"type": f"{HERE}.scripted:Count", "max_episode_tokens": 500},
            data={"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 12},
            batch={"micro_batch_tokens": 64},
        )


def test_an_engine_of_several_ranks_plays_no_episodes() -> None:
    layout = {"rollout": {"ranks": "0-1", "tp": 2}, "policy": {"ranks": "0-1"}}
    with pytest.raises(RecipeError, match="lets 2 ranks make one engine"):
        plan_of(
            "grpo",
            world_size=2,
            environment=f"{HERE}.scripted:Count",
            rollout={"engine": "vllm"},
            layout=layout,
        )
