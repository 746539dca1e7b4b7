"""Rewards that only fail are given up, and what they print or leave behind is bounded."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from tests.unit.rewards.calls import error_of, make_config, make_sample, own

from leaderless.config.run import GuardsConfig
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.protocol import Failures, RewardInput
from leaderless.rewards.reward_process import MAX_PRINTED_BYTES


def sample_of(group: int, response: str, answer: str = "") -> RewardInput:
    return RewardInput("", response, answer, {}, is_truncated=False, group=group)


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_reward_that_always_fails_is_given_up_and_named_at_once(num_processes: int) -> None:
    said: list[str] = []
    name = own("broken")
    with RewardPool(make_config({name: 1.0}), num_processes, failures=Failures(8, said.append)) as pool:
        graded = pool.grade([make_sample("a")] * 200, [None] * 200)
        again = pool.grade([make_sample("a")] * 3, [None] * 3)
    errors = [error_of(one, name) for one in graded]
    assert errors[0].startswith("LookupError: no such server (reward_functions.py:")
    assert errors[-1].startswith(f"RuntimeError: not graded, as {name} has failed")
    assert "LookupError: no such server" in errors[-1]
    if num_processes == 0:
        assert [one.startswith("LookupError") for one in errors] == [True] * 8 + [False] * 192
        kinds = [error_of(one, name).partition(":")[0] for one in again]
        assert kinds == ["LookupError", "RuntimeError", "RuntimeError"], "each call has one more chance"
    assert said[0].startswith(f"reward {name} failed: LookupError: no such server")
    assert "it grades no more responses of this step" in said[1]


@pytest.mark.parametrize("action", ["hang", "exit"])
def test_rewards_that_hang_or_end_their_process_hold_a_step_for_a_few_responses_only(action: str) -> None:
    name = own("what_is_said")
    with RewardPool(make_config({name: {"timeout_s": 0.1}}), 2, failures=Failures(2)) as pool:
        begin = time.monotonic()
        graded = pool.grade([make_sample(action)] * 100, [None] * 100)
    assert time.monotonic() - begin < 60, "100 would take longer"
    assert not any(one.is_valid for one in graded)


def test_a_row_that_cannot_be_graded_is_no_reason_to_give_a_reward_up() -> None:
    samples = [sample_of(group, "error" if group == 0 else "one") for group in range(4) for _ in range(16)]
    for num_processes in (0, 1):
        with RewardPool(make_config({own("what_is_said"): 1.0}), num_processes, failures=Failures(8)) as pool:
            graded = pool.grade(samples, [None] * len(samples))
        assert [one.is_valid for one in graded] == [sample.group != 0 for sample in samples]


def test_a_reward_that_has_succeeded_gets_its_full_chance_in_each_call() -> None:
    with RewardPool(make_config({own("what_is_said"): 1.0}), 0, failures=Failures(8)) as pool:
        assert pool.grade([make_sample("one")], [None])[0].is_valid
        pool.grade([make_sample("error")] * 9, [None] * 9)
        graded = pool.grade([*[make_sample("error")] * 7, make_sample("one")], [None] * 8)
        assert graded[-1].is_valid


def test_without_a_limit_all_responses_are_tried() -> None:
    with RewardPool(make_config({own("broken"): 1.0}), 0) as pool:
        graded = pool.grade([make_sample("a")] * 20, [None] * 20)
    assert {error_of(one, own("broken")).partition(":")[0] for one in graded} == {"LookupError"}


@pytest.mark.parametrize(("limit", "count"), [(0.5, 8), (0.0, 8), (0.1, 8), (0.9, 53), (None, None)])
def test_more_failures_are_awaited_where_more_may_fail(limit: float | None, count: int | None) -> None:
    assert GuardsConfig(reward_failures_limit=limit).hopeless_failures == count


def test_a_run_that_is_asked_to_stop_does_not_wait_for_a_reward_that_only_fails() -> None:
    name, failures = own("what_is_said"), Failures(8)
    failures.is_stopping = lambda: True
    with RewardPool(make_config({name: {"timeout_s": 1}}), 1, failures=failures) as pool:
        begin = time.monotonic()
        graded = pool.grade([make_sample("hang")] * 50, [None] * 50)
        assert time.monotonic() - begin < 20, "one second for the first, and none for the others"
    assert "not graded" in error_of(graded[-1], name)
    good = Failures(8)
    good.is_stopping = lambda: True
    with RewardPool(make_config({name: 1.0}), 0, failures=good) as pool:
        graded = pool.grade([make_sample(one) for one in ("one", "error", "one")], [None] * 3)
    assert [one.is_valid for one in graded] == [True, False, True]


def test_one_response_is_tried_before_the_first_step_and_counts_for_nothing() -> None:
    failures = Failures(1)
    with RewardPool(make_config({own("broken"): 1.0, own("length"): 1.0}), 1, failures=failures) as pool:
        errors = pool.try_on(make_sample("a"), None)
        assert [*errors] == [own("broken")]
        assert "no such server" in errors[own("broken")]
        assert failures.hopeless(own("broken")) is None


def test_what_rewards_print_is_bounded_in_each_call(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool(make_config({own("shout"): 1.0, own("chatter"): 1.0}), 1) as pool:
        assert all(one.is_valid for one in pool.grade([make_sample("a")] * 4, [None] * 4))
    errors = capfd.readouterr().err
    assert "the rest of this step is left out" in errors
    assert MAX_PRINTED_BYTES <= len(errors) < MAX_PRINTED_BYTES + 200
    with RewardPool(make_config({own("chatter"): 1.0}), 1) as pool:
        pool.grade([make_sample("a")], [None])
    assert "said by a reward" in capfd.readouterr().err


@pytest.mark.parametrize("action", ["one", "exit", "hang"])
def test_processes_in_sessions_of_their_own_do_not_outlive_the_reward_that_started_them(
    tmp_path: Path, action: str
) -> None:
    file = tmp_path / "child"
    with RewardPool(make_config({own("leave_session"): {"timeout_s": 3}}), 1) as pool:
        graded = pool.grade([make_sample(action, str(file))], [None])[0]
        assert graded.is_valid == (action == "one")
    pid, end = int(file.read_text()), time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
