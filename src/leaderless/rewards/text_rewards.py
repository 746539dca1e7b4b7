"""Rewards that compare texts, those of policies that search, and the expected answer. Imports no torch."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence

from leaderless.base.values import Json
from leaderless.config.rewards import ExactMatchOptions, FormatOptions, SearchFormatOptions
from leaderless.rewards.protocol import Passage, RewardInput, RewardResult

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)
_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_ARTICLES = {"a", "an", "the"}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

_NEXT = {
    ("start", "<think>"): "in think",
    ("in think", "</think>"): "after think",
    ("after think", "<search>"): "in search",
    ("in search", "</search>"): "after search",
    ("after search", "<information>"): "in information",
    ("in information", "</information>"): "start",
    ("after think", "<answer>"): "in answer",
    ("in answer", "</answer>"): "end",
}
"""The state after a tag; other tags are out of place."""


class ExactMatchReward:
    """1 where the response equals the expected answer, else 0."""

    def __init__(self, options: ExactMatchOptions) -> None:
        self._options = options

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response; a ValueError if the expected answer is neither text nor a number."""
        expected, response = expected_text(sample.answer), sample.response.strip()
        if self._options.ignore_case:
            expected, response = expected.casefold(), response.casefold()
        return RewardResult(float(response == expected), response)


class FormatReward:
    """1 where the whole response matches a pattern, else 0; white space at its ends does not count."""

    def __init__(self, options: FormatOptions) -> None:
        self._pattern = re.compile(options.pattern, re.DOTALL)

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response."""
        return RewardResult(float(self._pattern.fullmatch(sample.response.strip()) is not None))


def expected_text(answer: Json) -> str:
    """The expected answer as text; a ValueError if it is neither text nor a finite number."""
    if answer is None:
        raise ValueError("the row has no expected answer; `answer` of the dataset must name the column that holds it")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the expected answer is a {type(answer).__name__}, but must be text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"the expected answer is {answer}, but must be finite")
    text = str(answer).strip()
    if not text:
        raise ValueError("the expected answer is empty; leave out rows without one")
    return text


class AnswerMatchReward:
    """1 where what the policy wrote between its last `<answer>` and `</answer>` is an expected answer, else 0.

    Both are compared in small letters, without punctuation, articles and surplus blanks, as in SQuAD.

    Source: arXiv 2503.09516, `verl/utils/reward_score/qa_em.py`. Deviation: the original searches the prompt, too, and
    so takes no answer unless there are two; its prompt has one as an example. Here what the policy wrote counts alone.
    """

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response; a ValueError if no answer is expected."""
        expected = [normalized(text) for text in expected_texts(sample.answer)]
        given = answer_in(sample.response)
        return RewardResult(0.0) if given is None else RewardResult(float(given in expected), given)


class SearchFormatReward:
    """A right answer, with less for wrong form, and small rewards for form where there is no right answer.

    | answer | form | value |
    | --- | --- | --- |
    | right | right | 1 |
    | right | wrong | 1 - `structure` |
    | wrong or none | right, and a page that was found has the answer | `structure` + `retrieval` |
    | wrong or none | right | `structure` |
    | wrong | wrong | `final` |
    | none | wrong | 0 |

    The form is right if the transcript is a sequence of `<think>`, `<search>`, `<information>`, again `<think>`, and so
    on, that ends with `<think>` and `<answer>`, each closed by its tag, with nothing but blanks between them.

    Source: arXiv 2505.15117, `verl/utils/reward_score/qa_em_format.py` of Search-R1. Deviations: as in
    `AnswerMatchReward`; and only what the environment wrote counts as information, so the form is wrong where the
    policy has written such a tag.
    """

    def __init__(self, options: SearchFormatOptions) -> None:
        self._structure, self._retrieval, self._final = options.structure, options.retrieval, options.final

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a transcript; a ValueError if no answer is expected."""
        expected = [normalized(text) for text in expected_texts(sample.answer)]
        said = "".join(passage.text for passage in sample.transcript if passage.is_sampled)
        given, has_form = answer_in(said), is_well_formed(sample.transcript)
        if given in expected:
            return RewardResult(1.0 if has_form else 1.0 - self._structure, given)
        if has_form:
            pages = [passage.text for passage in sample.transcript if not passage.is_sampled]
            found = [normalized(text) for page in pages for text in _INFORMATION.findall(page)]
            has_found = any(answer in text for answer in expected for text in found)
            return RewardResult(self._structure + self._retrieval * has_found, given)
        return RewardResult(0.0 if given is None else self._final, given)


def answer_in(text: str) -> str | None:
    """The last answer in what the policy wrote, normalized; None if there is none."""
    found = _ANSWER.findall(text)
    return normalized(found[-1]) if found else None


def normalized(text: str) -> str:
    """A text in small letters, without punctuation, articles and surplus blanks; a text of articles keeps them."""
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def expected_texts(answer: Json) -> list[str]:
    """The expected answers: one, or any of a list.

    Raises:
        ValueError: There is none, or one is neither text nor a number.
    """
    answers = answer if isinstance(answer, list) else [answer]
    if not answers:
        raise ValueError("the row has no expected answer: its list is empty; leave out such rows")
    return [expected_text(one) for one in answers]


def is_well_formed(transcript: Sequence[Passage]) -> bool:
    """Whether all tags are in order, and information is from the environment."""
    state = "start"
    for passage in transcript:
        for part in _TAG.split(passage.text):
            if _TAG.fullmatch(part):
                if passage.is_sampled == part.endswith("information>"):
                    return False
                state = _NEXT.get((state, part), "")
            elif part.strip() and not state.startswith("in "):
                return False
    return state == "end"
