"""Rows with preferences: how they become tokens, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.pictures import picture, reader_of, vision_model
from tests.preferences import SINGLE_DATA, write_rows
from tests.templates import CHATML
from tests.tiny import tiny_model, tiny_recipe
from transformers import AutoTokenizer

from leaderless.config import RecipeError
from leaderless.config.data import DataConfig, DatasetConfig, TrainingSetConfig
from leaderless.data.dataset import open_dataset
from leaderless.data.prompts.encode import Encoded
from leaderless.data.prompts.preferences import make_encoder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.open_source import open_source

PAIR_COLUMNS = {"chosen": "chosen", "rejected": "rejected"}
PAIR = {"path": "rows.jsonl", "chosen": "good", "rejected": "bad"}


def encode(row: Mapping[str, Any], settings: Mapping[str, object], template: str | None = None) -> Encoded:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(chat_template=template))
    return make_encoder(tokenizer, DatasetConfig.model_validate(settings), "data.train").encode(row, "row 1")


def texts(encoded: Encoded, template: str | None = None) -> tuple[str, str, str]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(chat_template=template))
    assert encoded.response[-1] == tokenizer.eos_token_id
    assert not encoded.other or encoded.other[-1] == tokenizer.eos_token_id
    prompt, first, second = (
        tokenizer.decode(ids) for ids in (encoded.prompt, encoded.response[:-1], encoded.other[:-1])
    )
    return prompt, first, second


def test_a_pair_of_texts_has_a_prompt_and_two_responses_with_ends() -> None:
    encoded = encode({"prompt": "1+2=", "good": "3", "bad": "5 or 7"}, PAIR)
    assert texts(encoded) == ("1+2=", "3", "5 or 7")


def test_a_prompt_is_what_both_sides_share_where_there_is_no_column_for_it() -> None:
    assert texts(encode({"good": "1+2= 3", "bad": "1+2= 5"}, PAIR)) == ("1+2=", " 3", " 5")
    assert texts(encode({"good": "1+2=3", "bad": "1+2=35"}, PAIR)) == ("1+2=", "3", "35")


def test_messages_follow_those_of_the_prompt_as_the_chat_template_writes_them() -> None:
    user = {"role": "user", "content": "1+2"}
    good, bad = ([{"role": "assistant", "content": text}] for text in ("3", "4"))
    explicit = encode({"prompt": [user], "good": good, "bad": bad}, PAIR, CHATML)
    implicit = encode({"good": [user, *good], "bad": [user, *bad]}, PAIR, CHATML)
    assert explicit == implicit
    prompt, first, second = texts(explicit, CHATML)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(chat_template=CHATML))
    assert prompt == tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert prompt + first in tokenizer.apply_chat_template([user, *good], tokenize=False)
    assert (first[:1], second[:1]) == ("3", "4")


def test_single_responses_say_whether_they_are_desirable() -> None:
    settings = {"path": "rows.jsonl", "response": "answer", "desirable": "liked"}
    encoded = encode({"prompt": "1+2=", "answer": "3", "liked": False}, settings)
    assert texts(encoded)[:2] == ("1+2=", "3")
    assert not encoded.is_desirable
    assert encoded.other == []


def test_a_pair_may_have_a_margin() -> None:
    assert encode({"prompt": "1", "good": "3", "bad": "5", "gap": 2}, {**PAIR, "margin": "gap"}).margin == 2.0


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "1", "good": "3", "bad": "3"}, {}, "are the same response, which prefers nothing: leave such rows"),
        ({"prompt": "1", "good": "3", "bad": "3é"}, {}, "are the same response"),  # to this tokenizer
        ({"prompt": "1", "good": "3"}, {}, "has no column 'bad'"),
        ({"prompt": "1", "good": "3", "bad": None}, {}, "column 'bad' is null"),
        ({"prompt": "1", "good": "3", "bad": 4}, {}, "column 'bad' must hold text, or messages of the assistant"),
        ({"good": "3", "bad": "4"}, {}, "share nothing at their beginning that could be the prompt: name the column"),
        ({"good": "3", "bad": "34"}, {"prompt": "question"}, "has no column 'question'"),
        ({"good": "ab", "bad": [{"role": "user", "content": "a"}]}, {}, "one response is text and the other is not"),
        (
            {"prompt": "1", "good": [{"role": "user", "content": "3"}], "bad": "4"},
            {},
            "messages of the assistant that each have a 'content'; what comes before belongs to the prompt",
        ),
        (
            {"prompt": "1", "good": [{"role": "assistant", "content": "3"}], "bad": "4"},
            {},
            "holds messages, which need a chat template",
        ),
        ({"prompt": "1", "good": "3", "bad": "4", "gap": "2"}, {"margin": "gap"}, "it must be a finite number"),
        ({"prompt": "1", "good": "3", "bad": "4"}, {"answer": "key"}, "has no column 'key'"),
    ],
)
def test_a_row_that_says_nothing_is_refused_with_its_place(
    row: dict[str, Any], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        encode(row, {**PAIR, **settings})
    assert "row 1" in str(caught.value)
    assert message in str(caught.value)


def test_desirable_is_true_or_false_and_no_number() -> None:
    settings = {"path": "rows.jsonl", "response": "answer", "desirable": "liked"}
    with pytest.raises(RecipeError, match="column 'liked' holds 1; it must be true or false"):
        encode({"prompt": "1+2=", "answer": "3", "liked": 1}, settings)


@pytest.mark.parametrize("column", ["chosen", "rejected", "response"])
def test_a_response_has_no_token_that_stands_for_an_image(tmp_path: Path, column: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(16, 16))
    settings = {"path": f"{tmp_path}/rows.jsonl", "images": "image", "template": "plain"}
    settings |= {"response": "response", "desirable": "liked"} if column == "response" else PAIR_COLUMNS
    tokenizer = AutoTokenizer.from_pretrained(vision_model())
    encoder = make_encoder(tokenizer, DatasetConfig.model_validate(settings), "data.train", reader=reader_of)
    row = {"prompt": "how many ", "image": "a.png", "chosen": "1", "rejected": "2", "response": "3", "liked": True}
    assert len(encoder.encode(row, "row 1").images) == 1
    token = tokenizer.decode([min(reader_of().reserved)])
    with pytest.raises(
        RecipeError, match=rf"data\.train\.{column}: row 1: a response must not have '{re.escape(token)}'"
    ):
        encoder.encode(row | {column: f"1{token}"}, "row 1")


@pytest.mark.parametrize(("max_rows", "remedy"), [(None, "give more rows"), (1, "or raise evaluation.max_prompts")])
def test_a_single_response_needs_another_row_to_be_compared_with(
    tmp_path: Path, max_rows: int | None, remedy: str
) -> None:
    num_rows = 1 if max_rows is None else 3
    path = write_rows(tmp_path, "singles.jsonl", [{"prompt": "1+2=", "completion": "3", "label": True}] * num_rows)
    config = TrainingSetConfig.model_validate(SINGLE_DATA | {"path": str(path)})
    encoder = make_encoder(AutoTokenizer.from_pretrained(tiny_model()), config, "data.train")
    recipe = tiny_recipe(tmp_path, tiny_model()).recipe
    with pytest.raises(RecipeError, match=f"has one row of .* that can be used.*{remedy}"):
        open_dataset(open_source(config, "data.train", DataCache()), encoder, recipe, DataCache(), max_rows=max_rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chosen": "a"}, "chosen=a needs `rejected`"),
        ({"rejected": "a"}, "rejected=a needs `chosen`"),
        ({"chosen": "a", "rejected": "b", "response": "c"}, "pairs and single responses are not mixed"),
        ({"desirable": "a"}, "desirable=a needs `response`"),
        ({"margin": "a"}, "margin=a needs `chosen` and `rejected`"),
        ({"response": "a", "desirable": "b", "streaming": True}, "leave out `streaming`"),
    ],
)
def test_columns_that_belong_together_are_given_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"train": {"path": "rows.jsonl", **settings}})


def test_a_mixture_has_one_kind_of_rows() -> None:
    pairs, prompts = {"path": "a.jsonl", "chosen": "a", "rejected": "b"}, {"path": "b.jsonl"}
    with pytest.raises(ValidationError, match="all datasets of a mixture must have pairs"):
        DataConfig.model_validate({"train": {"pairs": pairs, "prompts": prompts}})
