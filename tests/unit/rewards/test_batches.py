"""Rewards that take all responses at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.recipes import make_recipe
from tests.unit.rewards.calls import error_of, make_config, make_sample, own

from leaderless.rewards.dry_run import try_rewards
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.registry import check_rewards


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_batch_reward_gets_all_of_its_responses_in_one_call_in_order(num_processes: int) -> None:
    name = own("ranks_of")
    check_rewards(make_config({name: 1.0}))
    responses = ["ccc", "a", "", "bb"] * 25
    sources = ["batch"] * 96 + ["other"] * 4
    config = make_config({name: {"sources": ["batch"]}, own("length"): {"weight": 10.0}})
    with RewardPool(config, num_processes) as pool:
        graded = pool.grade([make_sample(one) for one in responses], sources)
    values = {"ccc": 33.0, "a": 11.0, "bb": 22.0}
    for one, response, source in zip(graded, responses, sources, strict=True):
        if source == "other":
            assert one.value == 10.0 * len(response)
        elif response:
            assert one.value == values[response]
            assert one.details[name] == {"value": values[response] % 10, "answer": "96"}
        else:
            assert error_of(one, name) == "ValueError: returned None for this response"


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("error", "LookupError: no such server (reward_functions.py:"),
        ("too few", "TypeError: returned a list of 4 for 5 responses, but must return a list with a number, a Reward"),
        ("no list", "TypeError: returned a float for 5 responses, but must return a list"),
        ("hang", "TimeoutError: took longer than 1 s for 5 responses at once; raise its timeout_s"),
        ("exit", "RuntimeError: ended its process (exit code 3)"),
    ],
)
def test_an_error_of_a_batch_reward_fails_all_of_its_responses(action: str, error: str, tmp_path: Path) -> None:
    name, calls = own("whole_batch"), tmp_path / "calls"
    with RewardPool(make_config({name: {"timeout_s": 1}}), 2) as pool:
        graded = pool.grade([make_sample(action, str(calls))] * 5, [None] * 5)
        assert all(error_of(one, name).startswith(error) for one in graded)
        assert len(calls.read_text().splitlines()) == (2 if action == "exit" else 1), "in a new process once more"
        assert all(one.value == 1.0 for one in pool.grade([make_sample("one")] * 5, [None] * 5))


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_value_that_is_none_fails_its_response_alone(num_processes: int) -> None:
    name = own("whole_batch")
    with RewardPool(make_config({name: 1.0}), num_processes) as pool:
        graded = pool.grade([make_sample("some bad")] * 4, [None] * 4)
    assert [one.is_valid for one in graded] == [False, False, True, True]
    assert error_of(graded[0], name).startswith("ValueError: returned nan")
    assert error_of(graded[1], name).startswith("TypeError: returned a str")


def test_a_list_of_a_reward_without_the_decorator_is_an_error_that_names_it() -> None:
    name = f"{__name__}:undeclared"
    with RewardPool(make_config({name: 1.0}), 0) as pool:
        (graded,) = pool.grade([make_sample("a")], [None])
    assert error_of(graded, name).startswith("TypeError: returned a list, but must return a number or a RewardResult; ")
    assert "declare it with @batch_reward if it grades many responses at once" in error_of(graded, name)


def undeclared(samples: object) -> list[float]:
    return [1.0]


def test_a_batch_reward_is_tried_on_all_rows_at_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "?", "answer": "a"}\n{"question": "?", "answer": "bb"}\n')
    train = {"path": str(rows), "prompt": "question", "answer": "answer"}
    recipe = make_recipe(data={"train": train}, reward={own("ranks_of"): 1.0, own("length"): 1.0})
    trials = try_rewards(recipe, 2)
    assert [(trial.kind, trial.reward) for trial in trials] == [
        *(("expected", 2.0), ("empty", None)),
        *(("expected", 4.0), ("empty", None)),
    ]
    assert trials[0].scores[own("ranks_of")].answer == "4"
