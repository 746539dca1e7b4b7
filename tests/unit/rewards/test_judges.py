"""Judges on a server that answers well, badly, late, or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from tests.judge_server import Heard, Model, Said, between, by_length, serving
from tests.unit.rewards.calls import make_config, make_sample

from leaderless.base.values import Json
from leaderless.config import RecipeError, load_recipe
from leaderless.rewards.judges import asking, verdicts
from leaderless.rewards.judges.judge import AnswerFile
from leaderless.rewards.judges.verdicts import VerdictError, score_reader
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import RewardInput


def samples_of(*responses: str, group: int | None = 0, **columns: Json) -> list[RewardInput]:
    return [
        RewardInput("How are you?", response, "fine", {"question": "How are you?", **columns}, False, group=group)
        for response in responses
    ]


def graded_by(
    model: Model, responses: Sequence[str], path: Path | None = None, **options: object
) -> tuple[list[Graded], list[Heard]]:
    with serving(model) as server:
        config = make_config({"judge": {"url": server.url, "model": "wise", **options}})
        with RewardPool(config, 0, answers=AnswerFile(path)) as pool:
            return pool.grade(samples_of(*responses), [None] * len(responses)), server.heard


def values(graded: Sequence[Graded]) -> list[float | None]:
    return [one.value if one.is_valid else None for one in graded]


def error_of(graded: Graded) -> str:
    assert not graded.is_valid
    assert graded.value == 0.0
    detail = graded.details["judge"]
    assert isinstance(detail, Mapping)
    assert "value" not in detail
    return str(detail["error"])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.02)


def test_a_response_is_worth_what_the_judge_says_on_its_scale() -> None:
    graded, heard = graded_by(by_length, ["", "abcde", "abcdefghijkl"], weight=2.0)
    assert values(graded) == [0.0, 1.0, 2.0]
    assert graded[1].details["judge"] == {
        "value": 0.5,
        "answer": None,
        "said": "It has some characters.\nScore: 5",
    }
    assert {one.fields["model"] for one in heard} == {"wise"}
    assert {one.fields["temperature"] for one in heard} == {0.0}
    assert {one.fields["max_tokens"] for one in heard} == {512}
    assert "abcde" in heard[1].question or "abcde" in heard[2].question


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_judge_and_other_rewards_add_up(num_processes: int) -> None:
    with serving(by_length) as server:
        rewards = {
            "judge": {"url": server.url, "model": "wise", "weight": 0.5},
            "exact_match": 1.0,
            "judge-mild": {"url": server.url, "model": "wise", "scale": [0, 20]},
        }
        with RewardPool(make_config(rewards), num_processes) as pool:
            graded = pool.grade(samples_of("fine", "poor"), [None, None])
    assert values(graded) == pytest.approx([1.0 + 0.2 + 0.2, 0.2 + 0.2])


def test_a_template_shows_columns_and_expands_nothing_twice() -> None:
    prompt = '{prompt}|{response}|{answer}|{level}|{low}-{high}|{{response}}|{"a": {}}'
    with serving(lambda *_: "Score: 1") as server:
        config = make_config(
            {"judge": {"url": server.url, "model": "m", "prompt": prompt, "system": "Be {mood}.", "scale": [0, 1.5]}}
        )
        with RewardPool(config, 0) as pool:
            pool.grade(samples_of("{answer} \\1", level=3, mood="mild"), [None])
    system, user = server.heard[0].fields["messages"]  # type: ignore[misc]
    assert system == {"role": "system", "content": "Be mild."}
    assert user["content"] == 'How are you?|{answer} \\1|fine|3|0-1.5|{response}|{"a": {}}'


def test_a_row_without_a_shown_column_fails_alone_and_is_not_asked_about() -> None:
    with serving(by_length) as server:
        config = make_config(
            {"judge": {"url": server.url, "model": "m", "prompt": "<response>\n{response}\n</response>{level}"}}
        )
        with RewardPool(config, 0) as pool:
            graded = pool.grade([*samples_of("ab", level=1), *samples_of("cd")], [None, None])
    assert values(graded) == [0.2, None]
    assert "no such column (it has question)" in error_of(graded[1])
    assert len(server.heard) == 1


MALFORMED = [
    ("Good.", "nothing matches"),
    ("", "nothing matches"),
    ("Score: eleven", "nothing matches"),
    ("Score: 11", "must be from 0 to 10"),
    ("Score: -1", "must be from 0 to 10"),
]
MALFORMED_JSON = [
    ('{"score": "7"}', "is the text '7', but must be a number: have the prompt ask for a number without quotes"),
    ('{"score": true}', "is True, but must be a number"),
    ('{"score": null}', "is None, but must be a number"),
    ('{"score": NaN}', "must be from 0 to 10"),
    ('{"score": 1e999}', "must be from 0 to 10"),
    ('{"score": [7]}', "is [7], but must be a number"),
    ('{"points": 7}', "no JSON object with the field 'score'"),
    ('{"score": 7', "no JSON object"),
    ("{" * 5000 + '{"score":', "no JSON object"),
    ('{"a":' * 5000, "no JSON object"),
]


@pytest.mark.parametrize(
    ("said", "problem", "parse"),
    [(*one, None) for one in MALFORMED] + [(*one, {"json_field": "score"}) for one in MALFORMED_JSON],
)
def test_a_verdict_that_cannot_be_read_is_asked_for_again_and_then_fails(
    said: str, problem: str, parse: dict[str, str] | None
) -> None:
    graded, heard = graded_by(lambda *_: said, ["abc"], parse=parse, retries=2)
    assert values(graded) == [None]
    assert problem in error_of(graded[0])
    assert "say in `prompt` how the verdict must look" in error_of(graded[0])
    assert [one.num_messages for one in heard] == [1, 3, 5]
    assert "cannot be read" in heard[1].question
    assert graded[0].asked["judge"].requests == 3


def test_a_reminder_helps_a_judge_that_forgot_the_form() -> None:
    def forgetful(heard: Heard, number: int) -> str:
        return "Rather good." if heard.num_messages == 1 else "Score: 8"

    graded, heard = graded_by(forgetful, ["abc"])
    assert values(graded) == [0.8]
    assert heard[1].fields["messages"][1] == {"role": "assistant", "content": "Rather good."}  # type: ignore[index]


@pytest.mark.parametrize(
    ("said", "parse"),
    [
        ("Score: 3. On second thought, Score: 7", None),
        ("**Score:** 7/10", None),
        ("score:7.0", None),
        ("I give 7 points of 10", {"pattern": r"give (\d+)"}),
        ('{"score": 1} and so ```json\n{"score": 7, "why": {"score": 2}}\n```', {"json_field": "score"}),
        ("7", {"function": "tests.unit.rewards.test_judges:number_in"}),
    ],
)
def test_verdicts_are_found(said: str, parse: object) -> None:
    assert values(graded_by(lambda *_: said, ["abc"], parse=parse)[0]) == [0.7]


def number_in(text: str) -> float:
    return float(text)


def text_in(text: str) -> str:
    return text


@pytest.mark.parametrize(
    ("function", "said", "problem"),
    [("text_in", "7", "is the text '7', but must be a number"), ("number_in", "x", "raised ValueError: could not")],
)
def test_a_function_that_finds_no_number_fails_its_response_alone(function: str, said: str, problem: str) -> None:
    parse = {"function": f"tests.unit.rewards.test_judges:{function}"}
    graded, _ = graded_by(lambda *_: said, ["abc"], parse=parse, retries=0)
    assert problem in error_of(graded[0])


def test_an_answer_that_was_cut_says_so() -> None:
    graded, _ = graded_by(lambda *_: Said("Well,", finish_reason="length"), ["a"], retries=0, max_answer_tokens=5)
    assert "it ends at max_answer_tokens=5: raise it" in error_of(graded[0])


FAULTS: dict[str, Said] = {
    "status 500": Said(status=500),
    "status 429": Said(status=429),
    "in the format of OpenAI": Said(body=b"<html>busy</html>"),
    "of OpenAI": Said(body=b'{"choices": []}'),
    "connection broke": Said("Score: 5", is_cut=True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_server_is_followed_by_another_request(fault: str) -> None:
    graded, heard = graded_by(lambda _, number: FAULTS[fault] if number < 2 else "Score: 5", ["abc"])
    assert values(graded) == [0.5]
    assert len(heard) == 3
    assert graded[0].asked["judge"].requests == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_stays_faulty_fails_the_response(fault: str) -> None:
    graded, heard = graded_by(lambda *_: FAULTS[fault], ["abc"], retries=2)
    assert fault in error_of(graded[0])
    assert "asked 3 times" in error_of(graded[0])
    assert len(heard) == 3


@pytest.mark.parametrize(("status", "remedy"), [(401, "api_key_env"), (404, "`url` and `model`"), (400, "`request`")])
def test_a_refusal_that_will_not_change_is_not_asked_about_again(status: int, remedy: str) -> None:
    graded, heard = graded_by(lambda *_: Said(status=status, body=b'{"error": "no such model"}'), ["abc"])
    assert remedy in error_of(graded[0])
    assert "no such model" in error_of(graded[0])
    assert len(heard) == 1


def test_redirects_are_not_followed() -> None:
    with serving(by_length) as other:
        headers = {"location": f"{other.url}/chat/completions"}
        graded, _ = graded_by(lambda *_: Said(status=307, headers=headers), ["abc"])
    assert "status 307" in error_of(graded[0])
    assert other.heard == []


@pytest.mark.parametrize("said", [Said("Score: 5", delay_s=30.0), Said("Score: 5", drips_s=0.05)])
def test_a_late_answer_fails_its_response_alone_and_in_time(said: Said) -> None:
    def model(heard: Heard, number: int) -> Said | str:
        return said if "slow" in heard.question else by_length(heard, number)

    begin = time.monotonic()
    graded, _ = graded_by(model, ["ab", "slow", "abc"], timeout_s=0.6)
    assert time.monotonic() - begin < 3
    assert values(graded) == [0.2, None, 0.3]
    assert "no answer in time (timeout_s=0.6)" in error_of(graded[1])


def test_a_wait_that_the_server_asks_for_is_kept_by_all_requests() -> None:
    def model(heard: Heard, number: int) -> Said | str:
        return Said(status=429, headers={"retry-after": "0.5"}) if number == 0 else by_length(heard, number)

    graded, heard = graded_by(model, ["ab", "abc", "abcd"], max_requests=1)
    assert values(graded) == [0.2, 0.3, 0.4]
    assert heard[1].time - heard[0].time >= 0.5


@pytest.mark.parametrize("is_date", [False, True])
def test_a_wait_beyond_the_deadline_is_not_begun(is_date: bool) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=61), usegmt=True)
    wait = {"retry-after": date if is_date else "60"}
    begin = time.monotonic()
    graded, heard = graded_by(lambda *_: Said(status=503, headers=wait), ["ab"], timeout_s=5.0)
    assert time.monotonic() - begin < 2
    assert "it asks to wait" in error_of(graded[0])
    assert len(heard) == 1


def test_a_server_that_is_not_there_costs_little_time() -> None:
    with serving(by_length) as server:
        url = server.url
    config = make_config({"judge": {"url": url, "model": "m", "retries": 1, "max_requests": 2}})
    begin = time.monotonic()
    with RewardPool(config, 0) as pool:
        graded = pool.grade(samples_of(*(f"response {i}" for i in range(200))), [None] * 200)
    assert time.monotonic() - begin < 5
    assert values(graded) == [None] * 200
    assert "is it running?" in error_of(graded[0])
    assert "not asked, as 8 questions in a row failed" in error_of(graded[-1])


def test_requests_are_made_at_the_same_time_up_to_a_limit() -> None:
    def model(heard: Heard, number: int) -> Said:
        return Said("Score: 5", delay_s=0.1)

    with serving(model) as server:
        config = make_config({"judge": {"url": server.url, "model": "m", "max_requests": 4}})
        with RewardPool(config, 0) as pool:
            pool.grade(samples_of(*(f"response {i}" for i in range(12))), [None] * 12)
    assert server.most_at_once == 4


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE", "open sesame 123")
    body = b"wrong password: open sesame 123"
    graded, heard = graded_by(lambda *_: Said(status=401, body=body), ["ab"], api_key_env="MY_JUDGE")
    assert heard[0].key == "Bearer open sesame 123"
    assert "<MY_JUDGE>" in error_of(graded[0])
    assert "sesame" not in error_of(graded[0])


def test_further_fields_are_sent_and_null_removes_one() -> None:
    request = {"max_tokens": None, "max_completion_tokens": 9, "response_format": {"type": "json_object"}}
    _, heard = graded_by(lambda *_: "Score: 5", ["ab"], request=request, temperature=0.5)
    assert heard[0].fields.keys() == {"model", "messages", "temperature", "max_completion_tokens", "response_format"}
    assert heard[0].fields["temperature"] == 0.5


def test_equal_questions_are_asked_once() -> None:
    graded, heard = graded_by(by_length, ["ab", "abc", "ab", "ab"])
    assert values(graded) == [0.2, 0.3, 0.2, 0.2]
    assert len(heard) == 2
    assert sum(one.asked["judge"].cached for one in graded) == 2


def test_answers_are_kept_and_survive_the_process(tmp_path: Path) -> None:
    file = tmp_path / "answers" / "rank-0.jsonl"
    graded_by(by_length, ["ab", "abc"], file)
    with file.open("a") as lines:
        lines.write('{"key": "torn')  # as a killed process leaves it
    again, heard = graded_by(lambda *_: "Score: 9", ["abc", "ab", "abcd"], file)
    assert values(again) == [0.3, 0.2, 0.9]
    assert len(heard) == 1
    elsewhere, heard = graded_by(lambda *_: "Score: 1", ["abcd", "ab"], file.with_name("rank-1.jsonl"))
    assert (values(elsewhere), heard) == ([0.9, 0.2], [])
    other, heard = graded_by(lambda *_: "Score: 1", ["ab"], file, temperature=0.1)
    assert (values(other), len(heard)) == ([0.1], 1)


def test_failures_of_the_server_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    assert values(graded_by(lambda *_: Said(status=400), ["ab"], file)[0]) == [None]
    assert values(graded_by(by_length, ["ab"], file)[0]) == [0.2]


def test_no_more_answers_are_kept_than_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    responses = [f"response {i}" for i in range(10)]
    graded_by(lambda *_: "Score: 5", responses, file, kept_answers=3, max_requests=1)
    assert len(file.read_text().splitlines()) <= 6
    graded, heard = graded_by(lambda *_: "Score: 6", responses[-3:], file, kept_answers=3)
    assert (values(graded), heard) == ([0.5] * 3, [])
    graded_by(lambda *_: "Score: 5", responses, tmp_path / "none" / "rank-0.jsonl", kept_answers=0)
    assert not (tmp_path / "none").exists()


def test_a_rubric_is_the_weighted_mean_of_its_criteria() -> None:
    rubric = {"right": {"text": "Is it right?", "weight": 3}, "clear": "Is it clear?"}

    def model(heard: Heard, number: int) -> str:
        assert "- right: Is it right?\n- clear: Is it clear?" in heard.question
        assert '{"right": 3, "clear": 3}' in heard.question
        return 'So:\n{"right": 5, "clear": 2}'

    graded, _ = graded_by(model, ["ab"], rubric=rubric, scale=[1, 5])
    assert values(graded) == [(3 * 1.0 + 0.25) / 4]
    assert graded[0].details["judge"]["criteria"] == {"right": 1.0, "clear": 0.25}  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    ("said", "problem"),
    [('{"right": 5}', "no JSON object with a number for 'clear'"), ('{"right": 5, "clear": "2"}', "is the text '2'")],
)
def test_a_rubric_without_all_scores_fails(said: str, problem: str) -> None:
    graded, _ = graded_by(lambda *_: said, ["ab"], rubric={"right": "?", "clear": "?"}, retries=0)
    assert problem in error_of(graded[0])


def longer(heard: Heard, number: int = 0) -> str:
    """A judge who prefers the longer response wherever it stands."""
    first, second = (len(between(heard.question, f'response name="{name}"')) for name in "AB")
    return "Better: tie" if first == second else f"Better: {'A' if first > second else 'B'}"


def test_responses_are_compared_in_both_places_and_win_a_share() -> None:
    graded, heard = graded_by(longer, ["a", "abc", "ab"], pairwise={})
    assert values(graded) == [0.0, 1.0, 0.5]
    assert len(heard) == 6  # three pairs, twice
    shown = [tuple(between(one.question, f'response name="{name}"') for name in "AB") for one in heard]
    assert sorted(shown) == sorted((a, b) for a in ("a", "ab", "abc") for b in ("a", "ab", "abc") if a != b)
    asked = [one.asked["judge"] for one in graded]
    assert (sum(one.pairs for one in asked), sum(one.contradictions for one in asked)) == (3, 0)
    assert "[won; shown as" in str(graded[1].details["judge"]["said"])  # type: ignore[index, call-overload]


@pytest.mark.parametrize("verdict", ["A", "B"])
def test_a_judge_that_prefers_a_place_finds_ties(verdict: str) -> None:
    graded, _ = graded_by(lambda *_: f"Better: {verdict}", ["a", "abc", "ab"], pairwise={})
    assert values(graded) == [0.5] * 3
    asked = [one.asked["judge"] for one in graded]
    assert (sum(one.pairs for one in asked), sum(one.contradictions for one in asked)) == (3, 3)


def test_comparisons_do_not_depend_on_the_order_of_responses_and_are_bounded() -> None:
    responses = ["x" * i for i in range(1, 9)]
    forth, heard = graded_by(longer, responses, pairwise={"opponents": 2})
    back, _ = graded_by(longer, responses[::-1], pairwise={"opponents": 2})
    assert len(heard) == 8 * 2 * 2
    assert values(back) == values(forth)[::-1]
    assert forth[-1].value == 1.0
    assert forth[0].value == 0.0


def test_equal_responses_have_equal_values_and_are_not_compared() -> None:
    graded, heard = graded_by(longer, ["ab", "a", "ab"], pairwise={})
    assert values(graded) == [1.0, 0.0, 1.0]
    assert len(heard) == 2
    same, heard = graded_by(longer, ["ab", "ab"], pairwise={})
    assert (values(same), heard) == ([0.5, 0.5], [])


def test_groups_are_compared_apart_and_a_response_alone_fails() -> None:
    with serving(longer) as server:
        config = make_config({"judge": {"url": server.url, "model": "m", "pairwise": {}}})
        samples = [*samples_of("a", "abcdef", group=1), *samples_of("ab", "abc", group=2), *samples_of("a", group=3)]
        with RewardPool(config, 0) as pool:
            graded = pool.grade(samples, [None] * 5)
    assert values(graded) == [0.0, 1.0, 0.0, 1.0, None]
    assert "responses_per_prompt" in error_of(graded[-1])


def test_a_comparison_without_an_answer_is_left_out() -> None:
    def model(heard: Heard, number: int) -> Said | str:
        return Said(status=400) if "abc\n" in heard.question else longer(heard)

    graded, _ = graded_by(model, ["a", "ab", "abc"], pairwise={})
    assert values(graded) == [0.0, 1.0, None]


def test_a_default_judge_takes_what_no_reward_names() -> None:
    with serving(by_length) as server:
        judge = {"url": server.url, "model": "m", "sources": ["default"]}
        with RewardPool(make_config({"judge": judge, "exact_match": {"sources": ["sums"]}}), 0) as pool:
            graded = pool.grade(samples_of("fine", "fine", "fine"), ["sums", "chat", None])
    assert values(graded) == [1.0, 0.4, 0.4]
    assert [list(one.details) for one in graded] == [["exact_match"], ["judge"], ["judge"]]


def test_a_judge_that_is_a_role_is_asked_while_a_server_answers() -> None:
    is_asked = threading.Event()

    class Role:
        def ask(self, questions: Sequence[asking.JudgeQuestion], _: object) -> list[asking.JudgeReply]:
            is_asked.set()
            return [asking.JudgeReply(0.5) for _ in questions]

    with serving(lambda *_: "Score: 10" if is_asked.wait(10) else "it has waited in vain") as server:
        settings = {"url": server.url, "model": "m", "retries": 0}
        rewards = make_config({"judge": settings, "judge-role": {"role": "judge"}})
        with RewardPool(rewards, 0) as pool:
            (graded,) = pool.grade([make_sample("yes")], [None], {"judge-role": Role()})
    assert (graded.value, graded.is_valid) == (1.5, True)


def test_a_pattern_that_takes_too_long_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "SEARCH_S", 0.1)
    options = make_config({"judge": {"url": "http://h/v1", "model": "m", "parse": "((?:a|aa)+)!"}}).judge
    assert options is not None
    with pytest.raises(VerdictError, match=r"took more than 0.1 s: write it without repetitions of repetitions"):
        score_reader(options, "judge")("a" * 80)


@pytest.mark.parametrize("url", ["http://me:hunter22@h:port/v1", "http://h/v1?key=hunter22", "ftp://me:hunter22@h"])
def test_no_error_shows_the_password_of_an_address(url: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps({"name": "r", "reward": {"judge": {"url": url, "model": "m"}}}))
    with pytest.raises(RecipeError, match=r"judge\.url") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert "hunter22" not in str(caught.value)
    assert "hunter22" not in repr(caught.value.problems)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"url": "127.0.0.1:8000"}, "must be an address such as"),
    ({"url": "http://a:b@c/v1"}, "api_key_env"),
    ({"url": "http://c/v1/chat/completions"}, "must end before /chat/completions"),
    ({"prompt": "Is it good?"}, "must have the place {response}"),
    ({"pairwise": {}, "prompt": "{first}"}, "must have the places {first} and {second}"),
    ({"prompt": "{response} {first}"}, "has the place {first}"),
    ({"prompt": "{response} {rubric}"}, "has the place {rubric}"),
    ({"scale": [1, 1]}, "must have a lowest score that is below"),
    ({"scale": [1, 2], "pairwise": {}}, "scale does nothing with pairwise"),
    ({"rubric": {"a": "?"}, "pairwise": {}}, "cannot be combined"),
    ({"rubric": {"a": "?"}, "parse": "(x)"}, "parse does nothing with a rubric"),
    ({"parse": "x"}, "must have a group"),
    ({"parse": "(x"}, "is no regular expression"),
    ({"parse": {"json_field": "a", "pattern": "(a)"}}, "must give one of"),
    ({"parse": {"function": "number"}}, "package.module:function"),
    ({"api_key_env": "sk-123"}, "should match pattern"),
    ({"model": None}, "model must be the name that the server"),
    ({"url": None}, "or give the role of a model of the recipe"),
    ({"max_question_tokens": 9}, "max_question_tokens does nothing with url"),
    ({"role": "judge"}, "url does nothing with role=judge, whose model is models.judge"),
]


@pytest.mark.parametrize(("options", "problem"), WRONG)
def test_settings_that_cannot_work_are_refused_with_the_remedy(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match="judge") as caught:
        make_config({"judge": {"url": "http://127.0.0.1:1/v1", "model": "m", **options}})
    assert problem in str(caught.value)
