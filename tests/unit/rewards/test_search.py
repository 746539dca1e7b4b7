"""Rewards of policies that search: hand-made episodes, and what the original gives for them."""

from __future__ import annotations

import pytest
from tests.unit.rewards.calls import make_sample

from leaderless.base.values import Json
from leaderless.config.rewards import SearchFormatOptions
from leaderless.environments.search.search_r1 import QUESTION
from leaderless.rewards.protocol import Passage, RewardInput, RewardResult
from leaderless.rewards.text_rewards import AnswerMatchReward, SearchFormatReward, normalized

THINK = "<think> I should look. </think>"
SEARCH = f"{THINK} <search> capital of Baro </search>"
FOUND = "\n\n<information>Doc 1(Title: Tiko) The capital of Baro.</information>\n\n"
OTHER = FOUND.replace("Tiko", "Zemu")
RIGHT, WRONG = "<answer> Tiko </answer>", "<answer> Zemu </answer>"


def episode(*passages: str, answer: Json = "Tiko") -> RewardInput:
    """What the policy and the environment wrote in turns, the policy first."""
    transcript = tuple(Passage(text, place % 2 == 0) for place, text in enumerate(passages))
    said = "".join(passage.text for passage in transcript if passage.is_sampled)
    return RewardInput("?", said, answer, {}, is_truncated=False, transcript=transcript)


@pytest.mark.parametrize(
    ("response", "expected", "value"),
    [
        ("<answer> Tiko </answer>", "Tiko", 1),
        ("so <answer>\nthe TIKO!\n</answer>", "Tiko", 1),
        ("<answer>Tiko</answer>", ["Baro", "A Tiko"], 1),
        ("<answer>Zemu</answer> no: <answer>Tiko</answer>", "Tiko", 1),
        ("<answer>Tiko</answer> no: <answer>Zemu</answer>", "Tiko", 0),
        ("<answer>Tiko Zemu</answer>", "Tiko", 0),
        ("<answer>Tiko", "Tiko", 0),
        ("Tiko", "Tiko", 0),
        ("<answer></answer>", "Tiko", 0),
        ("<answer></answer>", "A", 0),
        ("<answer>the</answer>", "a", 0),
        ("<answer>A</answer>", "A", 1),
        ("<answer>1944.</answer>", 1944, 1),
    ],
)
def test_the_last_answer_counts(response: str, expected: Json, value: float) -> None:
    assert AnswerMatchReward()(make_sample(response, expected)).value == value


def test_one_answer_in_the_response_is_enough_and_the_prompt_is_none() -> None:
    """The original asks for two, because it searches its prompt, which has one as an example."""
    prompt = QUESTION.format(question="?")
    assert prompt.count("<answer>") == 2, "the tag in the instruction, and the example"
    silent = RewardInput(prompt, "I do not know.", "Beijing", {}, is_truncated=False)
    assert AnswerMatchReward()(silent) == RewardResult(0.0)
    said = RewardInput(prompt, "<answer> Beijing </answer>", "Beijing", {}, is_truncated=False)
    assert AnswerMatchReward()(said) == RewardResult(1.0, "beijing")


def test_an_answer_in_what_was_found_is_not_the_policys() -> None:
    trap = episode(SEARCH, FOUND.replace("Tiko", RIGHT), f"{THINK} I do not know.")
    assert AnswerMatchReward()(trap).value == 0
    assert SearchFormatReward(SearchFormatOptions())(trap).value == 0


@pytest.mark.parametrize("expected", [[], None, "", [""], [None], {"a": 1}])
def test_without_an_expected_answer_nothing_can_be_graded(expected: Json) -> None:
    for reward in (AnswerMatchReward(), SearchFormatReward(SearchFormatOptions())):
        with pytest.raises(ValueError, match=r"the row has no expected answer|the expected answer is"):
            reward(make_sample(RIGHT, expected))


@pytest.mark.parametrize(
    ("passages", "value"),
    [
        ((SEARCH, FOUND, THINK + RIGHT), 1.0),
        ((f"{THINK}{RIGHT}",), 1.0),
        ((SEARCH, OTHER, f"\n{SEARCH}\n", FOUND, f"{THINK}\n{RIGHT}\n"), 1.0),
        ((SEARCH, FOUND, RIGHT), 0.8),
        ((RIGHT,), 0.8),
        ((f"{THINK} so {RIGHT}",), 0.8),
        ((f"{THINK}{RIGHT} that is it",), 0.8),
        ((f"{THINK}{THINK}{RIGHT}",), 0.8),
        ((f"{SEARCH}{FOUND}{THINK}{RIGHT}",), 0.8),
        ((SEARCH, FOUND, THINK + WRONG), 0.3),
        ((SEARCH, OTHER, f"{THINK}<answer>Kela</answer>"), 0.2),
        ((f"{THINK}{WRONG}",), 0.2),
        ((SEARCH, FOUND, WRONG), 0.1),
        ((WRONG,), 0.1),
        ((SEARCH, FOUND, THINK), 0.0),
        ((SEARCH, FOUND), 0.0),
        (("Tiko",), 0.0),
        (("",), 0.0),
    ],
)
def test_form_is_worth_what_the_paper_says(passages: tuple[str, ...], value: float) -> None:
    reward = SearchFormatReward(SearchFormatOptions())
    assert reward(episode(*passages)).value == pytest.approx(value)


def test_each_part_of_the_form_has_a_setting() -> None:
    reward = SearchFormatReward(SearchFormatOptions(structure=0.5, retrieval=0.25, final=0.0625))
    assert reward(episode(RIGHT)).value == 0.5
    assert reward(episode(SEARCH, FOUND, THINK + WRONG)).value == 0.75
    assert reward(episode(WRONG)).value == 0.0625


def test_articles_that_are_the_whole_text_remain() -> None:
    assert [normalized(text) for text in ("The  Beatles!", "a", "An A", "THE")] == ["beatles", "a", "an a", "the"]
