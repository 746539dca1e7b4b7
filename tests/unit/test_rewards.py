"""Rewards: what each says, and that no reward can harm anything but its own response."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from pebble.common import CONSTS

from leaderless.config import Json, RecipeError
from leaderless.config.rewards import ExactMatchOptions, FormatOptions, RewardsConfig
from leaderless.rewards import dispatch, pool
from leaderless.rewards.exact_match import ExactMatchReward
from leaderless.rewards.format import FormatReward
from leaderless.rewards.math import MathReward
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import RewardInput, RewardResult
from leaderless.rewards.registry import check_rewards, make_rewards
from leaderless.rewards.spawn import RewardProcess

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.5
FUNCTIONS = (
    *("length", "one", "large", "echo", "what_is_said", "hash_order", "process_id", "loaded_modules", "chatter"),
    *("leave_thread", "sleep_as_told", "crash_once"),
)


def own(name: str) -> str:
    return f"tests.unit.reward_functions:{name}"


def make_config(rewards: Mapping[str, object]) -> RewardsConfig:
    return RewardsConfig.model_validate(rewards)


def make_sample(response: str, answer: Json = None) -> RewardInput:
    return RewardInput("prompt", response, answer, {"question": "prompt"}, is_truncated=False)


def grade(rewards: RewardPool, name: str, responses: Sequence[str], answer: Json = None) -> list[Graded]:
    return rewards.grade([make_sample(response, answer) for response in responses], [name] * len(responses))


def error_of(graded: Graded, name: str) -> str:
    assert not graded.is_valid
    assert graded.value == 0.0
    detail = graded.details[name]
    assert isinstance(detail, Mapping)
    assert "value" not in detail
    return str(detail["error"])


def reward_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if isinstance(child, RewardProcess)}


EVERYTHING = {
    "exact_match": {"sources": ["exact_match", "both"], "weight": 2.0},
    "format": {"sources": ["format", "both"], "weight": -0.5, "pattern": r"<.*>", "timeout_s": TIMEOUT_S},
} | {own(name): {"sources": [name], "timeout_s": TIMEOUT_S} for name in FUNCTIONS}
EVERYTHING[own("large")] = {"sources": ["large"], "weight": 10.0}


@pytest.fixture(scope="module")
def rewards() -> Iterator[RewardPool]:
    """Two processes with every reward, each for the source of its name."""
    with RewardPool(make_config(EVERYTHING), 2) as rewards:
        yield rewards


# The rewards.


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("Janet has 16 - 3 - 4 = 9 eggs.\n#### 1,234", "So she makes $1,234.", "1.234"),
        ("Is the answer 7? No.\n#### 3\n#### 42", "the answer is 42", "7"),
        ("#### -5", "-5", "5"),
        (r"So $x = \boxed{\frac{1}{2}}$ holds.", r"\boxed{0.5}", r"\boxed{2}"),
        ("42", r"\boxed{42}", r"\boxed{43}"),
        (r"\frac{1}{2}", "1/2", "2"),
        (r"\dfrac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", r"\boxed{\sqrt{2}}"),
        ("$x$", "$x$", "$y$"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", r"\boxed{x^2+1}"),
        (r"2\pi", r"$2\pi$", "2"),
        ("1e-3", "0.001", r"\boxed{1}"),
        ("3.", "3", "4"),
        ("The answer is 18.", "18", "19"),
        (r"The answer is \frac{1}{2}", "0.5", "2"),
        (r"$\frac{1}{2}$ cup", "0.5", "2"),
        ("50%", "0.5", "0.05"),
        ("(1,2)", "$(1,2)$", "$(2,1)$"),
        (42, "42", "43"),
        (0.5, r"\boxed{\frac{1}{2}}", "0.6"),
        (1e-3, "0.001", "0.002"),
    ],
)
def test_math_reads_expected_answers_as_datasets_write_them(expected: Json, right: str, wrong: str) -> None:
    reward = MathReward()
    assert reward(make_sample(right, expected)).value == 1.0
    assert reward(make_sample(wrong, expected)).value == 0.0


@pytest.mark.parametrize("expected", [None, "", "  ", "18 = 9 * 2\n#### ", "}{", [42], {"a": 1}, True, math.nan])
def test_math_fails_without_a_usable_expected_answer(expected: Json) -> None:
    with pytest.raises(ValueError, match="expected answer"):
        MathReward()(make_sample("42", expected))


@pytest.mark.parametrize("response", ["", "  \n", "I do not know.", r"\boxed{}"])
def test_math_is_0_where_a_response_has_no_answer(response: str) -> None:
    assert MathReward()(make_sample(response, "42")) == RewardResult(0.0, None)


def test_math_takes_the_last_line_of_a_response_that_ends_as_gsm8k_does() -> None:
    response = "Is the answer 7? No.\nShe sold 48 / 2 = 24 in $5$ days.\n#### 1,072  \n"
    assert MathReward()(make_sample(response, "#### 1072")) == RewardResult(1.0, "1072")


@pytest.mark.parametrize(
    "ways",
    [
        ["0.5", r"\frac{1}{2}", "1/2", r"\boxed{.50}", r"$\dfrac12$", "#### 0.5", "50%", r"$x = \frac{2}{4}$"],
        ["1,234", "1234", r"$1{,}234$", "1234.00", r"\boxed{1234}"],
        [r"$\sqrt{2}/2$", r"$\frac{1}{\sqrt{2}}$", "0.7071068"],
        ["0", "-0.0", r"\boxed{0}"],
        [r"$10^{30}$", "1" + "0" * 30],
        [r"\boxed{(x+1)^2}", r"$x^2+2x+1$"],
        [r"\boxed{1,2}", r"\boxed{\{2, 1\}}", r"$\{1.0, 2\}$"],
        [r"\boxed{[0, \frac12]}", r"$[0, 0.5]$"],
    ],
)
def test_equal_answers_are_counted_together(ways: list[str]) -> None:
    answers = {MathReward()(make_sample(way, "7")).answer for way in ways}
    assert len(answers) == 1
    assert None not in answers


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "2"), ("0.000000001", "0.000000002"), ("1" + "0" * 30, "1" + "0" * 29 + "1"), ("$x$", "$y$")],
)
def test_different_answers_are_not_counted_together(one: str, other: str) -> None:
    reward = MathReward()
    assert reward(make_sample(one, "7")).answer != reward(make_sample(other, "7")).answer


def test_exact_match_ignores_white_space_at_the_ends_and_case_when_told() -> None:
    exact = ExactMatchReward(ExactMatchOptions())
    assert exact(make_sample(" Paris\n", "Paris ")) == RewardResult(1.0, "Paris")
    assert exact(make_sample("paris", "Paris")) == RewardResult(0.0, "paris")
    assert exact(make_sample("Par is", "Paris")).value == 0.0
    assert exact(make_sample("42", 42)).value == 1.0
    loose = ExactMatchReward(ExactMatchOptions(ignore_case=True))
    assert loose(make_sample("PARIS ", "Paris")) == RewardResult(1.0, "paris")
    assert loose(make_sample("London", "Paris")).value == 0.0


@pytest.mark.parametrize("expected", [None, "", True, ["a"]])
def test_exact_match_fails_without_an_expected_answer(expected: Json) -> None:
    with pytest.raises(ValueError, match="expected answer"):
        ExactMatchReward(ExactMatchOptions())(make_sample("", expected))


def test_format_must_match_the_whole_response_across_lines() -> None:
    reward = FormatReward(FormatOptions(pattern=r"<think>.*</think>.+"))
    assert reward(make_sample("\n<think>a\nb</think>\n7 ")) == RewardResult(1.0, None)
    assert reward(make_sample("well, <think>a</think>7")).value == 0.0
    assert reward(make_sample("<think>a</think>")).value == 0.0
    assert FormatReward(FormatOptions(pattern=r"\d+"))(make_sample("12 apples")).value == 0.0


# Reading the recipe.


def test_rewards_of_a_recipe_become_functions_with_weight_limit_and_sources() -> None:
    config = make_config({own("length"): {"weight": 3, "timeout_s": 2, "sources": ["a"]}, "exact_match": 1.0})
    loaded = make_rewards(config)
    assert list(loaded) == list(config.options())
    reward = loaded[own("length")]
    assert (reward.weight, reward.timeout_s, reward.sources) == (3.0, 2.0, ("a",))
    assert reward.grade(make_sample("four")) == 4


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


@pytest.mark.parametrize("response", ["hang in c", "quiet exit"])
def test_a_hung_reward_fails_alone_and_in_time(rewards: RewardPool, response: str) -> None:
    responses = ["one"] * 40
    responses[7] = responses[8] = response
    start = time.monotonic()
    graded = grade(rewards, "what_is_said", responses)
    assert time.monotonic() - start < 8 * TIMEOUT_S
    assert [i for i, g in enumerate(graded) if not g.is_valid] == [7, 8]
    assert error_of(graded[7], own("what_is_said")) == f"TimeoutError: took longer than {TIMEOUT_S} s"
    assert sum(g.value for g in graded) == 38


@pytest.mark.parametrize(("response", "how"), [("exit", "exit code 3"), ("segfault", "SIGSEGV")])
def test_a_crashed_reward_fails_alone(rewards: RewardPool, response: str, how: str) -> None:
    responses = ["one"] * 40
    responses[7] = responses[39] = response
    graded = grade(rewards, "what_is_said", responses)
    assert [i for i, g in enumerate(graded) if not g.is_valid] == [7, 39]
    assert error_of(graded[7], own("what_is_said")) == f"RuntimeError: ended its process ({how})"
    assert sum(g.value for g in graded) == 38


def test_a_reward_whose_process_ended_by_another_s_doing_is_computed_again(rewards: RewardPool, tmp_path: Path) -> None:
    assert grade(rewards, "crash_once", [""], answer=str(tmp_path / "mark"))[0].value == 1.0


def test_a_reward_that_refuses_to_end_is_ended(rewards: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONSTS, "term_timeout", 0.2)
    bad, good = grade(rewards, "what_is_said", ["ignore the end", "one"])
    assert "TimeoutError" in error_of(bad, own("what_is_said"))
    assert good.value == 1.0


def test_the_limit_is_for_each_response_and_not_for_its_chunk(
    rewards: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CHUNKS_PER_PROCESS", 0.5)
    graded = grade(rewards, "sleep_as_told", ["0.12"] * 7)
    assert [g.value for g in graded] == [1.0] * 7
    # This one ends before its chunk must, and yet too late.
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


def test_cheap_rewards_cost_little_for_many_samples(rewards: RewardPool) -> None:
    samples = [make_sample("Paris", "Paris")] * 1024
    times = []
    for _ in range(3):
        start = time.monotonic()
        graded = rewards.grade(samples, ["exact_match"] * 1024)
        times.append(time.monotonic() - start)
        assert sum(g.value for g in graded) == 2048
    assert min(times) < 0.5
    assert len(rewards._split("exact_match", range(1024))) <= 16


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
    with pytest.raises(ValueError, match="num_processes=0: must be at least 1"):
        RewardPool(make_config({"exact_match": 1.0}), 0)
    rewards = RewardPool(make_config({"exact_match": 1.0}), 1)
    with pytest.raises(ValueError, match="2 samples but 1 sources"):
        rewards.grade([make_sample("a")] * 2, [None])
    rewards.close()
    rewards.close()
    with pytest.raises(RuntimeError, match="closed"):
        rewards.grade([make_sample("a")], [None])
    with pytest.raises(RuntimeError, match="closed"):
        rewards.start()


# The processes.


def test_start_begins_at_once_and_close_ends_all(rewards: RewardPool) -> None:
    others = reward_pids()
    pool = RewardPool(make_config({own("process_id"): 1.0, own("leave_thread"): {"weight": 0.0}}), 2)
    pool.start()
    pool.start()
    mine = reward_pids() - others
    assert len(mine) == 2
    assert {g.value for g in pool.grade([make_sample("")] * 64, [None] * 64)} <= mine
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5.0
    assert reward_pids() == others


def test_ctrl_c_does_not_reach_reward_processes(capfd: pytest.CaptureFixture[str]) -> None:
    others = reward_pids()
    with RewardPool(make_config({own("process_id"): 1.0}), 2) as rewards:
        pids = reward_pids() - others
        for _ in range(20):
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.02)
        graded = rewards.grade([make_sample("")] * 64, [None] * 64)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        graded += rewards.grade([make_sample("")] * 64, [None] * 64)
        assert reward_pids() - others == pids
    assert {g.value for g in graded} <= pids
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_processes_that_were_killed_are_replaced(rewards: RewardPool) -> None:
    others = reward_pids()
    with RewardPool(make_config({own("process_id"): 1.0}), 1) as mine:
        assert mine.grade([make_sample("")], [None])[0].is_valid
        (pid,) = reward_pids() - others
        os.kill(pid, signal.SIGKILL)
        graded = mine.grade([make_sample("")] * 5, [None] * 5)
    assert all(g.is_valid and g.value != pid for g in graded)


def test_an_interrupted_call_leaves_nothing_behind(rewards: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **settings: object) -> None:
        time.sleep(0.1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "wait", interrupt)
        before = reward_pids()
        with pytest.raises(KeyboardInterrupt):
            grade(rewards, "what_is_said", ["hang"])
        assert before
        assert before.isdisjoint(reward_pids())
    assert grade(rewards, "length", ["abc"])[0].value == 3.0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('no GPU here')", "cannot load the rewards: RecipeError.*no GPU here"),
        ("import os; os._exit(7)", "ended 4 times before they could grade a response"),
        ("import time; time.sleep(600)", "gave no sign of life for 1.5 s"),
    ],
)
def test_processes_that_cannot_start_are_an_error(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"reward_{abs(hash(code))}"
    guard = "import multiprocessing\nif multiprocessing.parent_process():\n    "
    (tmp_path / f"{module}.py").write_text(f"{guard}{code}\ndef reward(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in code:
        monkeypatch.setattr(dispatch, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(dispatch, "_NOTICE_S", 0.1)
    config = make_config({f"{module}:reward": {"timeout_s": 0.5}})
    check_rewards(config)
    with RewardPool(config, 1) as rewards, pytest.raises(RuntimeError, match=message):
        rewards.grade([make_sample("")], [None])


def run_script(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    """A worker of its own, whose main module has no `if __name__ == "__main__"` and is expensive to import."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "MARK = 'main was imported'\n"
        "from leaderless.config.rewards import RewardsConfig\n"
        "from leaderless.rewards.pool import RewardPool\n"
        "from leaderless.rewards.protocol import RewardInput\n"
        "sample = RewardInput('', 'abc', 'abc', {}, False)\n"
        f"name = 'tests.unit.reward_functions:'\n{code}"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_reward_processes_import_neither_torch_nor_the_main_module_and_print_to_standard_error(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        "rewards = {name + 'chatter': 1.0, name + 'loaded_modules': 1.0, 'math': 1.0, 'exact_match': 1.0}\n"
        "pool = RewardPool(RewardsConfig.model_validate(rewards), 1)\n"
        "graded = pool.grade([sample], [None])\n"
        "print(graded[0].details[name + 'loaded_modules']['answer'])\n"
        "print([module for module in ('torch', 'transformers') if module in sys.modules])\n"
        "import multiprocessing\n"
        "multiprocessing.active_children()[0].kill()\n"
        "pool.close()\n",
    )
    output, errors = script.communicate(timeout=60)
    assert output.splitlines() == ["None", "[]"]
    assert "said by a reward" in errors
    assert "said by a library" in errors
    assert script.returncode == 0


def test_reward_processes_end_with_their_worker(tmp_path: Path) -> None:
    script = run_script(
        tmp_path,
        "rewards = {name + 'what_is_said': {'timeout_s': 600}, name + 'leave_thread': {'sources': ['first']}}\n"
        "pool = RewardPool(RewardsConfig.model_validate(rewards), 1)\n"
        "pool.grade([RewardInput('', 'one', None, {}, False)], ['first'])\n"
        "import multiprocessing\n"
        "print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "pool.grade([RewardInput('', 'hang in c', None, {}, False)], [None])\n",
    )
    assert script.stdout is not None
    child = int(script.stdout.readline())
    time.sleep(0.3)
    os.kill(child, 0)
    script.kill()
    script.wait()
    end = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    script.stdout.close()


def test_importing_rewards_imports_neither_torch_nor_transformers() -> None:
    modules = sorted(path.stem for path in (ROOT / "src/leaderless/rewards").glob("*.py") if path.stem != "__init__")
    assert {"math", "pool", "protocol"} <= set(modules)
    imports = ", ".join(f"leaderless.rewards.{module}" for module in modules)
    code = f"import sys, {imports}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
