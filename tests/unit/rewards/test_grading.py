"""Many responses: order, sums, and that a reward can harm only its own response."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from tests.unit.rewards.calls import (
    EVERYTHING,
    TIMEOUT_S,
    error_of,
    grade,
    make_config,
    make_sample,
    own,
    reward_pids,
    serve_and_leave,
)

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.rewards import dispatcher
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.protocol import RewardInput
from leaderless.rewards.registry import check_rewards, make_rewards

# Reading the recipe.


def test_rewards_of_a_recipe_become_functions_with_weight_limit_and_sources() -> None:
    config = make_config({own("length"): {"weight": 3, "timeout_s": 2, "sources": ["a"]}, "exact_match": 1.0})
    rewards = make_rewards(config)
    assert list(rewards) == list(config.options())
    options = config.options()[own("length")]
    assert (options.weight, options.timeout_s, options.sources) == (3.0, 2.0, ("a",))
    names = (own("length"), "exact_match")
    assert [set(config.applying(source)) for source in ("a", "b", None)] == [{*names}, {names[1]}, {names[1]}]
    assert rewards[own("length")](make_sample("four")) == 4


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (own("two_arguments"), "must be callable with 1 positional argument"),
        (own("lengths"), "did you mean 'length'"),
        ("tests.unit.no_such_module:reward", "cannot be imported"),
        (own("coroutine"), "plain function"),
        (own("generator"), "plain function"),
        ("__main__:reward", "module that can be imported"),
    ],
)
def test_a_function_that_is_no_reward_is_refused_when_the_recipe_is_read(name: str, rule: str) -> None:
    config = make_config({"exact_match": 1.0, name: 1.0})
    with pytest.raises(RecipeError, match=rule) as refused:
        check_rewards(config)
    assert [problem.key for problem in refused.value.problems] == [f"reward.{name}"]
    with pytest.raises(RecipeError, match=rule):
        make_rewards(config)


def test_all_functions_that_are_no_rewards_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as refused:
        check_rewards(make_config({own("two_arguments"): 1.0, own("missing"): 1.0, own("length"): 1.0}))
    assert len(refused.value.problems) == 2


def test_good_rewards_are_not_refused() -> None:
    check_rewards(make_config(EVERYTHING))


# Grading many.


def test_samples_arrive_whole_and_results_keep_their_order(rewards: RewardPool) -> None:
    samples = [
        RewardInput([{"role": "user", "content": "hé"}], "x" * i, {"a": [i]}, {"image": [0.5, None]}, i % 2 == 0)
        for i in range(300)
    ]
    graded = rewards.grade(samples, ["length" if i % 3 else "echo" for i in range(300)])
    assert [g.value for g in graded] == [float(i) if i % 3 else 1.0 for i in range(300)]
    s = samples[6]
    echoed = f"{s.prompt}|{s.response}|{s.answer}|{s.row}|{s.is_truncated}"
    assert graded[6].details == {own("echo"): {"value": 1.0, "answer": echoed}}


def test_the_value_is_the_weighted_sum_of_the_rewards_that_apply(rewards: RewardPool) -> None:
    samples = [make_sample(response, "<5>") for response in ("<5>", "<4>", "5", "<5>")]
    graded = rewards.grade(samples, ["both", "both", "both", "exact_match"])
    assert [g.value for g in graded] == [1.5, -0.5, 0.0, 2.0]
    both = {"exact_match": {"value": 1.0, "answer": "<5>"}, "format": {"value": 1.0, "answer": None}}
    assert graded[0].details == both
    assert list(graded[3].details) == ["exact_match"]
    assert all(g.is_valid for g in graded)


@pytest.mark.parametrize("num_processes", [0, 1])
def test_the_time_of_grading_is_that_of_all_rewards_of_a_response(num_processes: int) -> None:
    with RewardPool(make_config({own("sleep_as_told"): 1.0, own("length"): 1.0}), num_processes) as pool:
        slow, fast = pool.grade([make_sample("0.2"), make_sample("0.0")], [None, None])
    assert 0.2 <= slow.seconds < 10
    assert fast.seconds < slow.seconds


def test_a_reward_without_sources_applies_to_all() -> None:
    with RewardPool(make_config({"exact_match": 1.0}), 1) as rewards:
        graded = rewards.grade([make_sample("a", "a")] * 2, [None, "web"])
    assert [g.value for g in graded] == [1.0, 1.0]


@pytest.mark.parametrize("source", ["elsewhere", None])
def test_a_row_that_no_reward_applies_to_fails(rewards: RewardPool, source: str | None) -> None:
    graded = rewards.grade([make_sample("a"), make_sample("a")], [source, "one"])
    assert "no reward applies to" in error_of(graded[0], "reward")
    assert (source or "without a source") in error_of(graded[0], "reward")
    assert graded[1].is_valid


def test_one_failed_reward_fails_the_sample_and_says_so_beside_the_others(rewards: RewardPool) -> None:
    graded = rewards.grade([make_sample("<5>")], ["both"])[0]
    assert "the row has no expected answer" in error_of(graded, "exact_match")
    assert graded.details["format"] == {"value": 1.0, "answer": None}


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("error", "KeyError: 'missing' (reward_functions.py:"),
        ("error in a library", "PatternError: " if sys.version_info >= (3, 13) else "error: "),
        ("system exit", "SystemExit: 0"),
        ("interrupt", "KeyboardInterrupt"),
        ("unspeakable error", "UnspeakableError: its message cannot be shown (RuntimeError)"),
        ("nan", "ValueError: returned nan, but must return a finite number"),
        ("inf", "ValueError: returned inf, but must return a finite number"),
        ("none", "TypeError: returned a NoneType, but must return a number or a RewardResult"),
        ("text", "TypeError: returned a str, but must return a number or a RewardResult"),
        ("lambda", "TypeError: returned a function, but must return a number or a RewardResult"),
        ("huge integer", "OverflowError"),
        ("number as answer", "TypeError: returned an answer that is a int"),
    ],
)
def test_an_error_of_a_reward_is_never_a_value(rewards: RewardPool, response: str, error: str) -> None:
    before, bad, after = grade(rewards, "what_is_said", ["one", response, "one"])
    assert error_of(bad, own("what_is_said")).startswith(error)
    assert before.value == after.value == 1.0


def test_what_a_reward_returns_becomes_plain_numbers_and_text(rewards: RewardPool) -> None:
    graded = grade(rewards, "what_is_said", ["unpicklable number", "surrogate"])
    assert [g.value for g in graded] == [1.0, 1.0]
    assert type(graded[0].value) is float
    assert graded[1].details == {own("what_is_said"): {"value": 1.0, "answer": r"\ud800"}}
    assert grade(rewards, "one", [""])[0].value == 1.0


def test_a_huge_error_is_cut_short(rewards: RewardPool) -> None:
    error = error_of(grade(rewards, "what_is_said", ["huge error"])[0], own("what_is_said"))
    assert error.startswith("ValueError: xxx")
    assert len(error) < 600


def test_a_sum_that_is_not_finite_fails(rewards: RewardPool) -> None:
    assert "must be finite" in error_of(grade(rewards, "large", [""])[0], "reward")


def test_a_sample_that_cannot_be_sent_fails_alone(rewards: RewardPool) -> None:
    lock = cast(Json, threading.Lock())
    samples = [make_sample(str(i), answer=lock if i == 5 else i) for i in range(20)]
    graded = rewards.grade(samples, ["length"] * 20)
    assert [i for i, g in enumerate(graded) if not g.is_valid] == [5]
    assert "pickle" in error_of(graded[5], own("length"))


def test_a_hung_reward_fails_alone_and_in_time(rewards: RewardPool) -> None:
    responses = ["one"] * 40
    responses[7] = responses[8] = "hang in c"
    start = time.monotonic()
    graded = grade(rewards, "what_is_said", responses)
    assert time.monotonic() - start < 60 * TIMEOUT_S
    assert [i for i, g in enumerate(graded) if not g.is_valid] == [7, 8]
    assert error_of(graded[7], own("what_is_said")) == f"TimeoutError: took longer than {TIMEOUT_S:g} s"
    assert sum(g.value for g in graded) == 38


@pytest.mark.parametrize(
    ("response", "how"), [("exit", "exit code 3"), ("quiet exit", "exit code 0"), ("segfault", "the signal SIGSEGV")]
)
def test_a_crashed_reward_fails_alone(rewards: RewardPool, response: str, how: str) -> None:
    responses = ["one"] * 40
    responses[7] = responses[39] = response
    graded = grade(rewards, "what_is_said", responses)
    assert [i for i, g in enumerate(graded) if not g.is_valid] == [7, 39]
    assert error_of(graded[7], own("what_is_said")) == f"RuntimeError: ended its process ({how})"
    assert sum(g.value for g in graded) == 38


@pytest.mark.parametrize("response", ["hang in c", "exit"])
def test_neighbors_of_responses_that_take_their_process_with_them_are_graded_once(
    rewards: RewardPool, tmp_path: Path, response: str
) -> None:
    bad = range(3, 40, 8)
    samples = [make_sample(response if i in bad else "one", str(tmp_path / str(i))) for i in range(40)]
    graded = rewards.grade(samples, ["mark_and_do"] * 40)
    assert [i for i, g in enumerate(graded) if not g.is_valid] == list(bad)
    gradings = [len((tmp_path / str(i)).read_text().splitlines()) for i in range(40)]
    # A response that ends its process is tried again in a new one, because an earlier response may be the cause.
    assert gradings == [2 if i in bad and response == "exit" else 1 for i in range(40)]


@pytest.mark.parametrize(
    ("is_hanging", "is_grading", "error", "chunk_sizes"),
    [
        (False, True, "RuntimeError: ended its process (exit code 3)", "3 1 1 "),
        (False, False, "", "3 2 "),
        (True, True, "TimeoutError: took longer than 0.1 s", "3 1 "),
        (True, False, "", "3 2 "),
    ],
)
def test_a_process_that_is_replaced_between_two_responses_blames_neither(
    is_hanging: bool,
    is_grading: bool,
    error: str,
    chunk_sizes: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "serve", partial(serve_and_leave, is_grading, is_hanging))
    monkeypatch.setattr(dispatcher, "_CHUNKS_PER_PROCESS", 1)
    sizes = tmp_path / "sizes"
    with RewardPool(make_config({"exact_match": {"timeout_s": 0.1}}), 1) as mine:
        samples = [make_sample(response, str(sizes)) for response in ("first", "second", "third")]
        first, second, third = mine.grade(samples, [None] * 3)
    assert first.value == third.value == 1.0
    assert (error_of(second, "exact_match") if error else second.value) == (error or 1.0)
    assert sizes.read_text() == chunk_sizes


def test_a_copy_of_the_process_that_a_reward_makes_does_not_answer(rewards: RewardPool) -> None:
    graded = grade(rewards, "what_is_said", ["fork", "one", "nan"] * 5)
    assert [g.value for g in graded] == [1.0, 1.0, 0.0] * 5


def test_a_reward_whose_process_ended_by_another_s_doing_is_computed_again(rewards: RewardPool, tmp_path: Path) -> None:
    assert grade(rewards, "crash_once", [""], answer=str(tmp_path / "mark"))[0].value == 1.0


def test_a_reward_that_refuses_to_end_is_ended(rewards: RewardPool) -> None:
    bad, good = grade(rewards, "what_is_said", ["ignore the end", "one"])
    assert "TimeoutError" in error_of(bad, own("what_is_said"))
    assert good.value == 1.0


def test_the_limit_is_for_each_response_and_not_for_its_chunk(
    rewards: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_CHUNKS_PER_PROCESS", 0.5)
    graded = grade(rewards, "sleep_as_told", ["0.12"] * 7)
    assert [g.value for g in graded] == [1.0] * 7
    # This one ends before its chunk must, but too late for itself.
    late = grade(rewards, "sleep_as_told", [str(TIMEOUT_S + 0.1)])[0]
    assert "TimeoutError" in error_of(late, own("sleep_as_told"))


def test_results_do_not_depend_on_the_number_of_processes(rewards: RewardPool) -> None:
    responses = ["one", "error", "<5>", "nan", "x"]
    samples = [make_sample(responses[i % 5], "<5>") for i in range(80)] + [make_sample("exit"), make_sample("hang")]
    sources = [("hash_order", "what_is_said", "length", "both")[i % 4] for i in range(80)] + ["what_is_said"] * 2
    with RewardPool(make_config(EVERYTHING), 1) as single:
        graded = single.grade(samples, sources)
    assert rewards.grade(samples, sources) == graded
    assert 40 < sum(g.is_valid for g in graded) < 80


def test_cheap_rewards_go_to_their_processes_many_at_a_time(rewards: RewardPool) -> None:
    assert rewards._dispatcher is not None
    assert len(rewards._dispatcher._split("exact_match", range(1024))) <= 16
    graded = rewards.grade([make_sample("Paris", "Paris")] * 1024, ["exact_match"] * 1024)
    assert sum(g.value for g in graded) == 2048


def test_no_samples_need_no_processes() -> None:
    before = reward_pids()
    rewards = RewardPool(make_config({"exact_match": 1.0}), 1)
    assert rewards.grade([], []) == []
    assert reward_pids() == before
    rewards.close()


def test_a_recipe_without_rewards_starts_no_process() -> None:
    before = reward_pids()
    with RewardPool(make_config({}), 2) as rewards:
        assert reward_pids() == before
        assert "no reward applies" in error_of(rewards.grade([make_sample("a")], [None])[0], "reward")


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="num_processes=-1: must be at least 0"):
        RewardPool(make_config({"exact_match": 1.0}), -1)
    rewards = RewardPool(make_config({"exact_match": 1.0}), 1)
    with pytest.raises(ValueError, match="2 samples but 1 sources"):
        rewards.grade([make_sample("a")] * 2, [None])
    rewards.close()
    rewards.close()
    with pytest.raises(RuntimeError, match="closed"):
        rewards.grade([make_sample("a")], [None])
    with pytest.raises(RuntimeError, match="closed"):
        rewards.start()


# In the worker's own process.


def test_without_processes_rewards_are_computed_in_this_one() -> None:
    news: list[str] = []
    before = reward_pids()
    config = make_config({own("process_id"): 1.0, own("sleep_as_told"): {"weight": 0.0, "timeout_s": 0.01}})
    with RewardPool(config, 0, news.append) as rewards:
        graded = rewards.grade([make_sample("0.05")] * 3, [None] * 3)
    assert {g.value for g in graded} == {float(os.getpid())}, "and time limits are not enforced"
    assert reward_pids() == before
    assert news == [*(f", {number}/6 graded" for number in range(1, 7)), ""]


def test_results_without_processes_are_those_with_them(rewards: RewardPool) -> None:
    responses = ["one", "error", "system exit", "nan", "surrogate", "huge error"]
    samples = [make_sample(responses[i % 6], "<5>") for i in range(24)]
    sources = [("what_is_said", "length", "both", "elsewhere")[i // 6] for i in range(24)]
    with RewardPool(make_config(EVERYTHING), 0) as alone:
        assert alone.grade(samples, sources) == rewards.grade(samples, sources)


def test_ctrl_c_in_a_reward_stops_the_worker_that_computes_it() -> None:
    with RewardPool(make_config(EVERYTHING), 0) as alone, pytest.raises(KeyboardInterrupt):
        grade(alone, "what_is_said", ["interrupt"])


def test_the_main_script_may_define_a_reward_that_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "my_reward", lambda _: 3.0, raising=False)
    config = make_config({"__main__:my_reward": 1.0})
    check_rewards(config, in_worker=True)
    with RewardPool(config, 0) as alone:
        assert alone.grade([make_sample("a")], [None])[0].value == 3.0
