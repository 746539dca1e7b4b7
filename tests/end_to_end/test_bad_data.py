"""Unusable data and models are reported with the place of the problem."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.end_to_end.alone import refused, run_alone
from tests.tiny import tiny_model, write_recipe

GOOD = b'{"question": "1+1=", "answer": "2"}\n'
DATA = {
    "empty file": (b"", "has no rows"),
    "no such column": (
        GOOD + b'{"quest": "1", "answer": "2"}\n',
        "rows.jsonl:2 has no column 'question' (did you mean",
    ),
    "null": (GOOD + b'{"question": null, "answer": "2"}\n', "rows.jsonl:2: column 'question' is null"),
    "wrong type": (GOOD + b'{"question": 5, "answer": "2"}\n', "rows.jsonl:2: column 'question' holds int"),
    "list of no messages": (
        b'{"question": [1], "answer": "2"}\n',
        "holds list; without a chat template it must be text",
    ),
    "no answer": (GOOD + b'{"question": "1"}\n', "rows.jsonl:2 has no column 'answer'"),
    "not JSON": (GOOD * 3 + b'{"question": oops}\n', "rows.jsonl:4 is not JSON"),
    "no object": (GOOD + b"[1, 2]\n", "rows.jsonl:2 must be an object"),
    "not text": (b"\xff\xfe\x00\x01\n", "rows.jsonl:1 is not JSON"),
    "a key twice": (
        GOOD + b'{"question": "1", "answer": "2", "answer": "3"}\n',
        "rows.jsonl:2 is not JSON: the key 'answer' is written twice; keep one",
    ),
    "a thousand levels": (GOOD + b'{"question": ' + b"[" * 9999 + b"\n", "rows.jsonl:2 is not JSON"),
    "half a surrogate": (
        GOOD + b'{"question": "1", "answer": "\\ud800"}\n',
        "rows.jsonl:2 holds half of a surrogate pair",
    ),
    "empty prompt": (GOOD + b'{"question": "", "answer": "2"}\n', "rows.jsonl:2 has an empty prompt"),
    "only long prompts": (b'{"question": "1234567890", "answer": "2"}\n', "all 1 rows of rows.jsonl are overlong"),
}


@pytest.mark.parametrize("case", DATA)
def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path: Path, case: str) -> None:
    content, message = DATA[case]
    (tmp_path / "rows.jsonl").write_bytes(content)
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1))
    errors = refused(tmp_path, "train", recipe, "data.train.path=rows.jsonl")
    assert message in errors
    assert "data" in errors


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damaged(content: bytes) -> bytes:
    return content[:-200] + b"\x00" * 150 + content[-50:]


def empty(content: bytes) -> bytes:
    return content[:0]


@pytest.mark.parametrize("damage", [truncated, damaged, empty])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"question": ["1+1="] * 500, "answer": ["2"] * 500}), file)
    file.write_bytes(damage(file.read_bytes()))
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1))
    assert "rows.parquet is not a readable Parquet file" in refused(
        tmp_path, "train", recipe, "data.train.path=rows.parquet"
    )


def test_a_parquet_file_damaged_inside_is_named_when_the_row_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"question": [f"{i}=" for i in range(500)], "answer": ["2"] * 500}), file)
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 64 + content[68:])
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1))
    errors = refused(tmp_path, "train", recipe, "data.train.path=rows.parquet")
    assert "rows.parquet is damaged in row group 0" in errors


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD * 5 + b'{"question": "1234567890", "answer": "2"}\n')
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1))
    outcome = run_alone(tmp_path, "train", recipe, "data.train.path=rows.jsonl", "steps=1")
    assert outcome.code == 0, outcome.errors
    assert "5 rows of rows.jsonl, 1 overlong left out" in outcome.output


def change(file: Path, **settings: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def without_end(model: Path) -> None:
    change(model / "tokenizer_config.json", eos_token=None, pad_token=None, tokenizer_class="PreTrainedTokenizerFast")


def without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def with_template(text: str) -> Callable[[Path], None]:
    return lambda model: change(model / "tokenizer_config.json", chat_template=text)


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no end of sequence": (without_end, "has no end-of-sequence token"),
    "no tokenizer": (without_tokenizer, "holds no tokenizer"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "cannot be loaded"),
    "half the weights": (
        lambda model: (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:9999]),
        "ends before its last weight",
    ),
    "other sizes": (lambda model: change(model / "config.json", intermediate_size=48), "but its config.json asks for"),
    "other layers": (lambda model: change(model / "config.json", num_hidden_layers=9), "cannot be loaded"),
    "broken config": (lambda model: (model / "config.json").write_text("{"), "cannot be loaded"),
    "unknown type": (lambda model: change(model / "config.json", model_type="qwen99"), "cannot be loaded"),
    "broken template": (with_template("{{ nope( }}"), "chat template cannot write a conversation of the roles user"),
    "template that refuses": (
        with_template("{{ raise_exception('no user') }}"),
        "roles user: no user; correct the template",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_used_is_named(tmp_path: Path, case: str) -> None:
    spoil, message = MODELS[case]
    shutil.copytree(tiny_model(num_layers=1), tmp_path / "model")
    spoil(tmp_path / "model")
    recipe = write_recipe(tmp_path, "model", {"data.train.template": "auto"})
    assert message in refused(tmp_path, "train", recipe)


@pytest.mark.parametrize("prompt", [5, [], [1], [{"role": "user"}], {"role": "user", "content": "x"}])
def test_a_chat_prompt_that_holds_no_messages_is_named(tmp_path: Path, prompt: object) -> None:
    model = tiny_model(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": prompt, "answer": "1"}))
    recipe = write_recipe(tmp_path, model, {"data.train.template": "chat"})
    errors = refused(tmp_path, "train", recipe, "data.train.path=rows.jsonl")
    assert "rows.jsonl:1: column 'question' must hold text, or a list of messages" in errors


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1))
    assert "the tokenizer has no chat template: use 'plain'" in refused(
        tmp_path, "train", recipe, "data.train.template=chat"
    )


def test_gradient_checkpointing_and_export_warn_of_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"steps": 1})
    outcome = run_alone(tmp_path, "train", recipe, "models.policy.gradient_checkpointing=true")
    assert (outcome.code, outcome.errors) == (0, "")
    outcome = run_alone(tmp_path, "export", "runs/tiny", "out")
    assert (outcome.code, outcome.errors) == (0, "")
