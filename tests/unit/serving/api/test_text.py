"""Streamed text is the text of all tokens, up to the first stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaderless.config.models import ModelConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.serving.api.text_stream import REPLACEMENT, TextStream

SAID = "ab é 你好 👩🏽 " + REPLACEMENT


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of single bytes, so that most characters above take several tokens."""
    path = write_tiny_model(tmp_path_factory.mktemp("bytes"), SAID, hidden_size=8)
    return load_tokenizer(ModelConfig(path=str(path)), "policy")


def parts(tokenizer: Tokenizer, tokens: list[int], *stop: str) -> list[str]:
    stream = TextStream(tokenizer, stop)
    return [*map(stream.add, tokens), stream.finish()]


def test_a_character_comes_whole_with_its_last_token(tokenizer: Tokenizer) -> None:
    assert parts(tokenizer, tokenizer.encode("a你é")) == ["a", "", "", "你", "", "é", ""]
    cut = tokenizer.encode("a👩")[:-1]
    assert parts(tokenizer, cut) == ["a", "", "", "", REPLACEMENT], "what is never completed is shown in the end"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert parts(tokenizer, [*tokenizer.encode("ab"), tokenizer.eos_token_id or 0]) == ["a", "b", "", ""]


def test_what_may_begin_a_stop_text_waits_and_nothing_follows_a_stop_text(tokenizer: Tokenizer) -> None:
    assert parts(tokenizer, tokenizer.encode("a ab你"), "ab") == ["", "a ", "", "", "", "", "", ""]
    assert parts(tokenizer, tokenizer.encode("aab"), "aaa", "b b") == ["", "", "aa", "b"]
    assert parts(tokenizer, tokenizer.encode("b a"), "你", "é") == ["b", " ", "a", ""]


@given(data=st.data())
def test_parts_make_up_the_text_of_all_tokens(data: st.DataObject, tokenizer: Tokenizer) -> None:
    text = data.draw(st.text(SAID, max_size=12))
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    tokens = [*tokenizer.encode(text), *data.draw(anything)]
    stop = data.draw(st.lists(st.text(SAID, min_size=1, max_size=3), max_size=2))
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    ends = [place for place in map(whole.find, stop) if place >= 0]
    assert "".join(parts(tokenizer, tokens, *stop)) == whole[: min(ends, default=len(whole))]
