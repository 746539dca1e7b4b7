"""Each row is judged by the teacher of its source, after the prompt that the teacher is shown."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.engines import ALONE
from tests.tiny import tiny_model
from tests.unit.recipes import make_recipe
from tokenizers import Tokenizer as Core
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.observability.metrics import Metrics
from leaderless.stages.context import StageContext
from leaderless.stages.distillation import teach, teacher_prompt, words_as_columns

TOKENS = [[5, 6, 7], [8], [9, 10]]
MASKS = [[True, False, True], [True], [True, True]]


class Teacher:
    """A teacher that finds one word likely, and remembers what it was asked."""

    micro_batch_tokens = 64

    def __init__(self, word: int) -> None:
        self.word, self.asked = word, list[tuple[int, list[int]]]()

    def likeliest_words(self, batch: Batch, how_many: int, temperature: float) -> Jagged:
        assert (how_many, temperature) == (1, 0.5)
        prompts = batch.jagged("prompt_tokens").to_lists()
        self.asked += list(zip(batch.ids.tolist(), prompts, strict=True))
        lengths = torch.tensor([sum(row) for row in batch.jagged("response_mask").to_lists()], dtype=torch.int64)
        found = torch.tensor([[[float(self.word), -1.0], [-0.1, 0.0]]]).expand(int(lengths.sum()), -1, -1)
        return Jagged(found, lengths, "response_tokens")


def samples(rows: list[dict[str, object]], masks: list[list[bool]] = MASKS) -> Batch:
    columns = {
        "prompt_tokens": Jagged.from_lists([[1], [2, 2], [3]], torch.int64, "prompt_tokens"),
        "tokens": Jagged.from_lists(TOKENS, torch.int64, "tokens"),
        "response_mask": Jagged.from_lists(masks, torch.bool, "tokens"),
        "rows": tuple(rows),
    }
    return Batch(torch.tensor([4, 2, 9]), columns)  # type: ignore[arg-type]


def context_of(recipe: Recipe, teachers: dict[str, Teacher]) -> StageContext:
    models = {f"teacher_{role}": SimpleNamespace(train_engine=teacher) for role, teacher in teachers.items()}
    node = SimpleNamespace(
        name="teacher", node=SimpleNamespace(teachers=[(f"teacher_{role}", role) for role in teachers])
    )
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    find: Callable[[str], Any] = models.__getitem__
    given = {"recipe": recipe, "node": node, "language_model": find, "tokenizer": tokenizer, "metrics": Metrics()}
    given["tokenizers"] = dict.fromkeys(teachers, tokenizer)
    return cast("StageContext", SimpleNamespace(**given))


def recipe_of(**distillation: object) -> Recipe:
    data = {"train": {"path": "rows.jsonl", "prompt": "question", "template": "plain", "source": "data_source"}}
    algorithm = {"distillation": {"top_k": 1, "temperature": 0.5, **distillation}}
    return make_recipe(workflow="gkd", data=data, algorithm=algorithm)


def test_each_row_has_the_teacher_of_its_source() -> None:
    teachers = {"solver": Teacher(30), "coder": Teacher(40)}
    recipe = recipe_of(teachers={"math": "solver", "code": "coder", "proofs": "solver"})
    batch = samples([{"data_source": one} for one in ("math", "code", "proofs")])
    found = teach(batch, context_of(recipe, teachers))
    assert [number for number, _ in teachers["solver"].asked] == [4, 9]
    assert [number for number, _ in teachers["coder"].asked] == [2]
    assert found.jagged("teacher_tokens").to_lists() == [[30, 30], [40], [30, 30]]
    assert found.jagged("teacher_sizes").to_lists() == [[1, 1], [1], [1, 1]]


def test_a_row_without_a_teacher_is_refused_with_the_names() -> None:
    teachers = {"solver": Teacher(30)}
    batch = samples([{"data_source": one} for one in ("math", "art", "math")])
    with pytest.raises(ValueError, match=r"of the source 'art', which has no teacher .*teachers: math\): name one"):
        teach(batch, context_of(recipe_of(teachers={"math": "solver"}), teachers))
    assert not teachers["solver"].asked


def test_a_teacher_with_a_context_reads_another_prompt_before_the_same_response() -> None:
    teacher = Teacher(30)
    recipe = recipe_of(context={"template": "{answer}>{prompt}", "max_prompt_tokens": 6}, teacher="policy")
    rows: list[dict[str, object]] = [
        {"question": "1+1=", "answer": answer, "data_source": "x"} for answer in ("2", "too long", "3")
    ]
    context = context_of(recipe, {"policy": teacher})
    batch = samples(rows)
    found = teach(batch, context)
    encode = context.tokenizer.encode
    assert teacher.asked == [(4, encode("2>1+1=")), (9, encode("3>1+1="))]
    assert found.jagged("teacher_sizes").to_lists() == [[1, 1], [0], [1, 1]]
    assert context.metrics.reduce(ALONE)["teacher/left_out"] == pytest.approx(1 / 3)
    assert found.jagged("prompt_tokens") is batch.jagged("prompt_tokens"), "the student's prompts stay"


ALL_SAMPLED = [[True] * len(row) for row in TOKENS]
ASKED: list[dict[str, object]] = [{"question": one, "answer": "2", "data_source": "x"} for one in ("1+1=", "2", "3+3=")]


def test_by_text_a_teacher_with_the_same_tokenizer_says_the_same() -> None:
    found = dict[str, Batch]()
    teachers = dict[str, Teacher]()
    for align in ("tokens", "text"):
        teachers[align] = Teacher(30)
        context = context_of(recipe_of(teacher="solver", align=align), {"solver": teachers[align]})
        found[align] = teach(samples(ASKED, ALL_SAMPLED), context)
    for name in ("teacher_tokens", "teacher_sizes", "teacher_log_probs"):
        given, expected = (found[align].jagged(name).to_lists() for align in ("text", "tokens"))
        assert [pytest.approx(row) for row in expected] == given
    encode = context.tokenizer.encode
    prompts = [(number, encode(str(row["question"]))) for number, row in zip([4, 2, 9], ASKED, strict=True)]
    assert teachers["text"].asked == prompts, "made of rows, by its own tokenizer"
    assert context.metrics.reduce(ALONE) == {"teacher/left_out": 0.0, "teacher/aligned": 1.0}


def test_by_text_rows_that_a_teacher_cannot_read_whole_have_none() -> None:
    teacher = Teacher(30)
    teacher.micro_batch_tokens = 4
    context = context_of(recipe_of(teacher="solver", align="text"), {"solver": teacher})
    found = teach(samples(ASKED, ALL_SAMPLED), context)
    assert [number for number, _ in teacher.asked] == [2]
    assert found.jagged("teacher_sizes").to_lists() == [[0, 0, 0], [1], [0, 0]]
    assert context.metrics.reduce(ALONE) == pytest.approx({"teacher/left_out": 2 / 3, "teacher/aligned": 1 / 6})


def test_by_text_a_tokenizer_whose_tokens_are_unknown_is_refused() -> None:
    context = context_of(recipe_of(teacher="solver", align="text"), {"solver": Teacher(30)})
    core = Core(models.WordPiece({"<end>": 0, "?": 1, "a": 2, "##b": 3}, unk_token="?"))
    context.tokenizers["solver"] = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")  # type: ignore[index]
    with pytest.raises(RecipeError, match="not known which text the tokens of role 'solver' stand for"):
        teach(samples(ASKED, ALL_SAMPLED), context)


@pytest.mark.parametrize(
    ("data", "shown", "written"),
    [
        ({"template": "plain"}, "1+1=", "1+1=(2)"),
        ({"template": "a{question}b"}, "1+1=", "a1+1=b(2)"),
        ({"template": "chat"}, "1+1=", "<user>1+1=(2)"),
        (
            {"template": "chat", "system": "be"},
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}],
            "<system>be<user>x<assistant>y<user>z(2)",
        ),
    ],
    ids=["plain", "a template", "text in a chat", "a conversation"],
)
def test_the_context_takes_the_place_of_what_the_student_was_asked_last(
    data: dict[str, object], shown: object, written: str
) -> None:
    chat = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model(chat_template=chat)), "policy")
    given = {"train": {"path": "rows.jsonl", "prompt": "question", **data}}
    algorithm = {"distillation": {"top_k": 1, "context": {"template": "{prompt}({answer})"}}}
    recipe = make_recipe(workflow="gkd", data=given, algorithm=algorithm)
    row = {"question": shown, "answer": "2"}
    assert tokenizer.decode(teacher_prompt(cast("Any", row), recipe, tokenizer)) == written


def test_a_row_without_a_column_of_the_context_is_named() -> None:
    recipe = recipe_of(context={"template": "{prompt} {feedback}"})
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    with pytest.raises(RecipeError, match=r"context.template.*'feedback'.*columns that are not null: question"):
        teacher_prompt({"question": "1+1=", "feedback": None}, recipe, tokenizer)


def test_words_become_columns_that_say_how_many_there_are() -> None:
    values = torch.tensor([[[3.0, 4.0, -1.0], [-1.0, -2.0, 0.0]], [[5.0, 6.0, 7.0], [-3.0, -4.0, -5.0]]])
    found = words_as_columns(Jagged(values, torch.tensor([1, 0, 1]), "response_tokens"))
    assert found["teacher_tokens"].to_lists() == [[3, 4], [], [5, 6, 7]]
    assert found["teacher_log_probs"].to_lists() == [[-1, -2], [], [-3, -4, -5]]
    assert found["teacher_sizes"].to_lists() == [[2], [], [3]]
