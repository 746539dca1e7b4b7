"""Words of a teacher with another tokenizer as words of its student, by the text that they stand for.

    student   Tom | has | 34 |  app | les | .         words where both begin a token: all but "les"
    teacher   Tom | has | 3 | 4 |  apples  | .

Where a token of the student begins, so does one of the teacher, or there are no words. The probability of the
student's own token is that of all of the teacher's tokens in it, here of "3" and then "4". Every other word is the
student's word with the same text, or with the first part of it: " apples" is " app". Aligning by text, and multiplying
the probabilities of the parts of a word, are GOLD's (Patiño et al., 2025, "Unlocking On-Policy Distillation for Any
Model Family", section "Sequence alignment").
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from leaderless.algorithms.divergences import TAIL_FLOOR
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.token_text import TokenText

_END = b"\0"
"""What stands for the end of a response, behind its text."""


class WordsByText:
    """Turns words of a teacher into words of its student."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        """Read both vocabularies."""
        self._student, self._teacher = TokenText(student), TokenText(teacher)
        self._found: dict[tuple[int, bool], int] = {}

    def read(self, response: Sequence[int]) -> list[int]:
        """The tokens of the teacher for a response of the student: those of its text, and the end if it has one.

        The text ends before the first token that is no text, and before bytes that are no characters.
        """
        text, has_end = self._text(response)
        return self._teacher.encode(text.decode()) + [self._teacher.end] * has_end

    def _text(self, response: Sequence[int]) -> tuple[bytes, bool]:
        """The text of a response, and whether its end is right behind it."""
        pieces = list[bytes]()
        for token in response:
            if (piece := self._student.of(token)) is None:
                break
            pieces.append(piece)
        whole = b"".join(pieces).removeprefix(b" " if self._student.adds_blank else b"")
        text = _characters(whole)
        return text, len(text) == len(whole) and len(pieces) == len(response) - 1

    def words(self, response: Sequence[int], own: Sequence[int], found: Tensor) -> Tensor:
        """Words of the student at each token of its response.

        Args:
            response: Tokens of the student.
            own: Tokens of the teacher, as `read` gives them.
            found: [len(own), 2, k + 1] words and their log-probabilities at each of these, with the token itself among
                them; -1 for no word.

        Returns:
            [len(response), 2, k + 1] words and their log-probabilities, the k likeliest and the token itself; -1 for no
            word.
        """
        text, has_end = self._text(response)
        end = response[-1] if has_end else self._student.end
        student, teacher = self._student.pieces(response, text), self._teacher.pieces(own, text)
        if has_end:
            student.append(_END)
            teacher += [_END] * (sum(map(len, teacher)) == len(text))
        borders = [*accumulate(map(len, teacher), initial=0)]
        # A teacher may begin with a blank that is no text.
        begins = {borders[place]: place for place in reversed(range(len(teacher)))}
        ends = {border: place for place, border in enumerate(borders[1:])}
        of_own = found[:, 1].masked_fill(found[:, 0] != torch.tensor(own)[:, None], -math.inf).amax(1).tolist()
        result, place_in_text = torch.full((len(response), 2, found.shape[2]), -1.0, dtype=found.dtype), 0
        for place, piece in enumerate(student):
            begin, place_in_text = place_in_text, place_in_text + len(piece)
            if not piece or begin not in begins:
                continue
            first, last = begins[begin], ends.get(place_in_text, -1)
            masses, is_first = self._masses(found[first], end, is_first=begin == 0), begin == 0
            if last >= first:
                # Of the teacher's first token, the part that goes on like the student's is the student's own.
                joint = math.exp(sum(of_own[first : last + 1]))
                source = self._word(own[first], end, is_first=is_first)
                if source != response[place]:
                    masses[source] -= joint
                    if masses[source] < TAIL_FLOOR:  # float32 says no less of a difference
                        del masses[source]
                    masses[response[place]] += joint
            _write(result[place], masses, response[place])
        return result

    def _masses(self, found: Tensor, end: int, *, is_first: bool) -> dict[int, float]:
        """Probabilities of words of the student, from [2, k + 1] words of the teacher and their log-probabilities."""
        masses = defaultdict[int, float](float)
        for word, log_prob in zip(*found.tolist(), strict=True):
            if word >= 0:
                masses[self._word(int(word), end, is_first=is_first)] += math.exp(log_prob)
        return masses

    def _word(self, word: int, end: int, *, is_first: bool) -> int:
        """The word of the student with the text of one of the teacher, or with the first part of it; -1 for none."""
        if word == self._teacher.end:
            return end
        if (word, is_first) not in self._found:
            text = self._teacher.of(word)
            if text and is_first:  # where blanks do not count
                text = text.removeprefix(b" " if self._teacher.adds_blank else b"")
                text = b" " * self._student.adds_blank + text
            self._found[word, is_first] = self._begin_of(text)
        return self._found[word, is_first]

    def _begin_of(self, text: bytes | None) -> int:
        if not text:
            return -1
        known = self._student.tokens
        if text in known:
            return known[text]
        if _characters(text) == text:
            pieces = self._student.pieces(self._student.encode(text.decode()), text)
            first = next(filter(None, pieces), b"")
            if first in known:
                return known[first]
        longest = max((size for size in range(1, len(text)) if text[:size] in known), default=0)
        return known.get(text[:longest], -1)


def _write(place: Tensor, masses: Mapping[int, float], token: int) -> None:
    """Write the k likeliest words, and the token itself if it is known, with log-probabilities into [2, k + 1]."""
    least = torch.finfo(place.dtype).tiny
    known = sorted((-mass, word) for word, mass in masses.items() if word >= 0 and mass > least)
    words = [word for _, word in known[: place.shape[1] - 1]]
    words += [word for _, word in known[len(words) :] if word == token]
    place[0, : len(words)] = torch.tensor(words, dtype=place.dtype)
    place[1, : len(words)] = torch.tensor([math.log(masses[word]) for word in words], dtype=place.dtype)


def _characters(whole: bytes) -> bytes:
    """The bytes before the first that is no character."""
    try:
        whole.decode()
    except UnicodeDecodeError as error:
        return whole[: error.start]
    return whole
