"""Words of a teacher with another tokenizer, next to a search through all texts that its words may begin."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from leaderless.algorithms.divergences import TAIL_FLOOR
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.token_text import TokenText
from leaderless.stages.words_by_text import WordsByText

TEXTS = [
    "Tom has 34 apples and gets 58 more.",
    "How many apples does Tom have now? Tom has 92 apples.",
    "naïve cafés — 漢字 and 🙂 emoticons",
    "  blanks   and\nnew lines\n\n",
    "e",
]
END = "<end>"


def trained(size: int, texts: Sequence[str] = TEXTS) -> Tokenizer:
    """A tokenizer of bytes, with words that are frequent in some texts."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet)
    )
    return cast("Tokenizer", PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END))


def of_pieces(size: int) -> Tokenizer:
    """A tokenizer of pieces, as SentencePiece's: a blank before each text, and bytes of unknown characters."""
    learned = Core(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    learned.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=size))
    described = json.loads(learned.to_str())["model"]
    names = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *described["vocab"]]
    merges = [tuple(pair) for pair in described["merges"]]
    vocabulary = {name: place for place, name in enumerate(names)}
    core = Core(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(back)
    return cast("Tokenizer", PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END))


BYTES, MORE_BYTES, PIECES = trained(300), trained(420, [*TEXTS, *["apples"] * 9]), of_pieces(120)
PAIRS = [(BYTES, MORE_BYTES), (MORE_BYTES, BYTES), (PIECES, MORE_BYTES), (BYTES, PIECES), (PIECES, PIECES)]
NAMES = ["coarser", "finer", "pieces from bytes", "bytes from pieces", "the same"]


def found_at(own: Sequence[int], num_words: int, how_many: int, seed: int = 0) -> tuple[Tensor, list[dict[int, float]]]:
    """What a teacher gives at its tokens, its likeliest words and the token itself, and the whole of it."""
    torch.manual_seed(seed)
    log_probs = torch.randn(len(own), num_words, dtype=torch.float64).mul(3).log_softmax(1)
    rows, whole = list[Tensor](), list[dict[int, float]]()
    for token, row in zip(own, log_probs, strict=True):
        words = row.topk(how_many).indices.tolist()
        last = -1 if token in words else token
        scores = [float(row[word]) for word in words] + [float(row[token])]
        rows.append(torch.tensor([[*words, last], scores], dtype=torch.float64))
        whole.append({word: float(row[word]) for word in ({*words, token})})
    return torch.stack(rows) if rows else torch.empty(0, 2, how_many + 1, dtype=torch.float64), whole


@cache
def texts_of(tokenizer: Tokenizer) -> TokenText:
    return TokenText(tokenizer)


@cache
def pieces_first(tokenizer: Tokenizer) -> list[int]:
    """All tokens, those that stand for a byte of a character behind the others."""
    fallbacks = {token for name, token in tokenizer.get_vocab().items() if name.startswith("<0x")}
    return sorted(range(len(tokenizer)), key=lambda token: (token in fallbacks, token))


@cache
def first_word(tokenizer: Tokenizer, text: bytes) -> int | None:
    """The word of a student for a word of its teacher: the one with its text, or the first in its text."""
    own = texts_of(tokenizer)
    equal = [token for token in pieces_first(tokenizer) if own.of(token) == text]
    if equal:
        return equal[0]
    try:
        pieces = [own.of(token) or b"" for token in tokenizer.encode(text.decode(), add_special_tokens=False)]
    except UnicodeDecodeError:
        pieces = []
    whole = b"".join(pieces)
    blank = len(whole) - len(text) if whole.endswith(text) else len(pieces)  # that was put before the text
    begin = next((piece[max(0, blank - size) :] for piece, size in passed(pieces) if size + len(piece) > blank), b"")
    same = [token for token in pieces_first(tokenizer) if begin and own.of(token) == begin]
    if same:
        return same[0]
    parts = [
        (len(piece), token) for token in pieces_first(tokenizer) if (piece := own.of(token)) and text.startswith(piece)
    ]
    longest = max((size for size, _ in parts if size < len(text)), default=0)
    return next((token for size, token in parts if size == longest), None)


def passed(pieces: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Each piece with the number of bytes before it."""
    return [(piece, sum(map(len, pieces[:place]))) for place, piece in enumerate(pieces)]


def texts_before(tokenizer: Tokenizer, tokens: Sequence[int], text: bytes) -> list[bytes]:
    """The text before each token and behind the last one; the end of a response is a text, too."""
    pieces = [b"|" if one == tokenizer.eos_token_id else texts_of(tokenizer).of(one) or b"" for one in tokens]
    if tokenizer is PIECES and b"".join(pieces).removesuffix(b"|") != text:
        pieces[0] = pieces[0].removeprefix(b" ")
    assert b"".join(pieces).removesuffix(b"|") == text
    return [b"".join(pieces[:place]) for place in range(len(pieces) + 1)]


def searched(
    student: Tokenizer,
    teacher: Tokenizer,
    response: Sequence[int],
    own: Sequence[int],
    whole: Sequence[Mapping[int, float]],
) -> list[dict[int, float]]:
    """Probabilities of the student's words at each of its tokens, by comparing texts from their beginning on."""

    def turned_of(word: int, *, is_first: bool) -> int | None:
        if word == teacher.eos_token_id:
            return student.eos_token_id
        text = texts_of(teacher).of(word) or b""
        if text and is_first:
            text = b" " * (student is PIECES) + (text.removeprefix(b" ") if teacher is PIECES else text)
        return first_word(student, text)

    text = b"".join(texts_of(student).of(token) or b"" for token in response)
    text = text.removeprefix(b" ") if student is PIECES else text
    mine, others = texts_before(student, response, text), texts_before(teacher, own, text)
    found = list[dict[int, float]]()
    for place, token in enumerate(response):
        row = dict[int, float]()
        if mine[place] in others[:-1] and mine[place] != mine[place + 1]:
            first = others.index(mine[place])
            for word, log_prob in whole[first].items():
                turned = turned_of(word, is_first=not mine[place])
                if turned is not None:
                    row[turned] = row.get(turned, 0.0) + math.exp(log_prob)
            if mine[place + 1] in others[first + 1 :]:
                last = others.index(mine[place + 1])
                joint = math.prod(math.exp(whole[one][own[one]]) for one in range(first, last))
                source = turned_of(own[first], is_first=not mine[place])
                if source != token:
                    if source is not None:
                        row[source] -= joint
                        if row[source] < TAIL_FLOOR:
                            del row[source]
                    row[token] = row.get(token, 0.0) + joint
        found.append(row)
    return found


def as_dict(row: Tensor) -> dict[int, float]:
    return {int(word): math.exp(value) for word, value in zip(*row.tolist(), strict=True) if word >= 0}


@pytest.mark.parametrize(("student", "teacher"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("has_end", [True, False], ids=["ended", "cut"])
def test_words_have_the_probabilities_of_their_texts(
    student: Tokenizer, teacher: Tokenizer, text: str, has_end: bool
) -> None:
    response = student.encode(text, add_special_tokens=False) + [student.eos_token_id or 0] * has_end
    words = WordsByText(student, teacher)
    own = words.read(response)
    assert (own[-1] == teacher.eos_token_id) == has_end
    found, whole = found_at(own, len(teacher), len(teacher))
    expected = searched(student, teacher, response, own, whole)
    given = words.words(response, own, found)
    assert given.shape == (len(response), 2, len(teacher) + 1)
    for row, one in zip(given, expected, strict=True):
        assert as_dict(row) == pytest.approx(one, rel=1e-9, abs=1e-15)
        assert sum(as_dict(row).values()) < 1 + 1e-9
    assert any(expected), "some tokens begin where tokens of the teacher do"


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_with_the_same_tokenizer_words_stay_as_they_are(tokenizer: Tokenizer) -> None:
    words, rng = WordsByText(tokenizer, tokenizer), random.Random(0)
    response = [*tokenizer.encode(rng.choice(TEXTS[:2]), add_special_tokens=False), tokenizer.eos_token_id or 0]
    assert words.read(response) == response
    found, whole = found_at(response, len(tokenizer), 5)
    texts, end = texts_of(tokenizer), tokenizer.eos_token_id
    rows = list(zip(words.words(response, response, found), whole, strict=True))
    for row, one in rows[tokenizer is PIECES :]:  # whose first word may have a blank or not
        known = dict[int, float]()
        for word, value in one.items():
            if word == end or texts.of(word):  # two tokens may have the same text: a piece, and a byte
                same = word if word == end else texts.tokens[texts.of(word) or b""]
                known[same] = known.get(same, 0.0) + math.exp(value)
        assert as_dict(row) == pytest.approx(known)


def test_a_word_in_several_tokens_of_the_teacher_has_the_product_of_their_probabilities() -> None:
    student, teacher = MORE_BYTES, BYTES
    (apples,) = student.encode("apples", add_special_tokens=False)
    own = WordsByText(student, teacher).read([apples])
    assert len(own) > 1
    found, whole = found_at(own, len(teacher), 3)
    given = as_dict(WordsByText(student, teacher).words([apples], own, found)[0])
    assert given[apples] == pytest.approx(
        math.prod(math.exp(row[token]) for row, token in zip(whole, own, strict=True))
    )


def test_no_words_where_a_token_begins_within_one_of_the_teacher() -> None:
    student, teacher = BYTES, MORE_BYTES
    response = student.encode("apples", add_special_tokens=False)
    words = WordsByText(student, teacher)
    own = words.read(response)
    assert len(own) == 1 < len(response)
    found, _ = found_at(own, len(teacher), 3)
    given = [as_dict(row) for row in words.words(response, own, found)]
    assert given[0]
    assert not any(given[1:])


def test_a_response_that_is_cut_within_a_character_is_read_up_to_it() -> None:
    tokens = BYTES.encode("5 漢", add_special_tokens=False)
    words = WordsByText(BYTES, PIECES)
    own = words.read(tokens[:-1])
    assert PIECES.decode(own) == "5 "
    found, _ = found_at(own, len(PIECES), 3)
    assert [bool(as_dict(row)) for row in words.words(tokens[:-1], own, found)][-1] is False


def test_nothing_is_read_behind_a_token_that_is_no_text() -> None:
    end = BYTES.eos_token_id or 0
    response = [*BYTES.encode("a", add_special_tokens=False), end, *BYTES.encode("b", add_special_tokens=False)]
    assert WordsByText(BYTES, PIECES).read(response) == PIECES.encode("a", add_special_tokens=False)


def test_the_text_of_tokens_is_known_of_bytes_and_pieces_alone() -> None:
    assert all(TokenText(one).is_known() for one in (BYTES, MORE_BYTES, PIECES))
    core = Core(models.WordLevel({END: 0, "?": 1, "Tom": 2}, unk_token="?"))
    assert not TokenText(cast("Tokenizer", PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END))).is_known()
