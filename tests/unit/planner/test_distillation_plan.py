"""Where teachers are, what is sent of them, what their memory is, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.recipes import only_problem, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.planner import Plan
from leaderless.planner.workflow.columns import TEACHER_COLUMNS

MIXTURE = {"train": {name: {"path": f"{name}.jsonl", "weight": 1.0} for name in ("math", "code")}}


def plan(
    folder: Path, world_size: int = 1, *, distillation: dict[str, object] | None = None, **sections: object
) -> Plan:
    path = write_model(folder / "model", vocab_size=5000)
    models = dict.fromkeys(("policy", "reference"), path)
    given = {"models": models, "algorithm": {"distillation": distillation or {}, "aggregation": "token_mean"}}
    workflow = str(sections.pop("workflow", "gkd"))
    return plan_of(workflow, world_size, **given | sections)


def test_a_teacher_of_all_words_is_where_the_student_is_trained(tmp_path: Path) -> None:
    found = plan(tmp_path, 2)
    assert found.pruned == ("teacher",)
    assert dict(found["policy"].uses) == {"policy": "train", "reference": "score"}
    assert not {*TEACHER_COLUMNS} & found["policy"].reads.keys()
    (teacher,) = (one for one in found.instances if one.role == "reference")
    assert teacher.teaches
    assert teacher.layout == found["policy"].layout


def test_given_words_come_from_other_ranks_by_columns(tmp_path: Path) -> None:
    layout = {"teacher": {"ranks": "1"}, "policy": {"ranks": "0"}, "rollout": {"ranks": "0"}, "reward": {"ranks": "0"}}
    found = plan(tmp_path, 2, distillation={"top_k": 8}, layout=layout)
    assert not found.pruned
    assert dict(found["teacher"].uses) == {"reference": "score"}
    assert dict(found["policy"].uses) == {"policy": "train"}
    assert {*TEACHER_COLUMNS} <= found["policy"].reads.keys()
    assert not any(one.teaches for one in found.instances)
    (edge,) = (one for one in found.edges if one.source == "teacher")
    assert edge.kind == "reshard"
    more = plan(tmp_path, 2, distillation={"top_k": 80}, layout=layout)
    (larger,) = (one for one in more.edges if one.source == "teacher")
    assert 6 < larger.max_bytes / edge.max_bytes < 9  # 81 words for each token in place of 9


def test_memory_counts_what_a_teacher_leaves_for_its_student(tmp_path: Path) -> None:
    whole, given = plan(tmp_path), plan(tmp_path, distillation={"top_k": 8})
    assert whole.memory is not None
    assert given.memory is not None
    parts = whole.memory.cpu.phases["policy trains"]
    assert parts["hidden states of teachers"] > 0
    assert "hidden states of teachers" not in given.memory.cpu.phases["policy trains"]


def test_each_source_has_a_teacher_on_the_ranks_of_one_node(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", vocab_size=5000)
    models = dict.fromkeys(("policy", "solver", "coder"), path)
    teachers = {"top_k": 4, "teachers": {"math": "solver", "code": "coder"}}
    found = plan(tmp_path, distillation=teachers, models=models, data=MIXTURE)
    assert dict(found["teacher"].uses) == {"solver": "score", "coder": "score"}
    assert "rows" in found["teacher"].reads


SERVER = {"url": "http://127.0.0.1:8000/v1", "model": "large"}


def test_a_server_is_asked_by_a_node_without_a_model(tmp_path: Path) -> None:
    models = {"policy": write_model(tmp_path / "model", vocab_size=5000)}
    found = plan(tmp_path, 2, distillation={"top_k": 4, "server": SERVER}, models=models)
    assert not found["teacher"].uses
    assert {*TEACHER_COLUMNS} <= found["policy"].reads.keys()
    with pytest.raises(RecipeError, match="no node of the workflow 'gkd' has this role"):
        plan(tmp_path, 2, distillation={"top_k": 4, "server": SERVER})


CONTEXT = {"template": "{prompt} {answer}"}
REFUSED: dict[str, tuple[dict[str, object], dict[str, object], str, str]] = {
    "no teacher": ({}, {"models": {"policy": "/no/model"}}, "models", "must name models.reference"),
    "itself": ({"teacher": "policy"}, {}, "algorithm.distillation.teacher", "imitates itself learns nothing"),
    "kl": (
        {},
        {"algorithm": {"kl": {"coefficient": 0.1}}},
        "algorithm.kl.coefficient",
        "does nothing for node 'policy', whose loss is the divergence",
    ),
    "pp": ({}, {"layout": {"policy": {"pp": 2}}}, "layout.policy", "leave out pp"),
    "another workflow": ({"top_k": 3}, {"workflow": "rloo"}, "algorithm.distillation.top_k", "use a workflow that has"),
    "no source": ({"top_k": 3, "teachers": {"math": "reference"}}, {}, "algorithm.distillation.teachers", "no source"),
    "a set without a teacher": (
        {"top_k": 3, "teachers": {"math": "reference"}},
        {"data": MIXTURE},
        "algorithm.distillation.teachers",
        "has no teacher for the dataset 'code'",
    ),
    "a teacher without a set": (
        {"top_k": 3, "teachers": {"math": "reference", "code": "reference", "art": "reference"}},
        {"data": MIXTURE},
        "algorithm.distillation.teachers.art",
        "is no dataset",
    ),
    "episodes": (
        {"top_k": 3, "align": "text"},
        {"environment": {"type": "calculator"}, "reward": {}, "data": {"train": {"path": "a.jsonl"}}},
        "algorithm.distillation.align",
        "but here episodes write them",
    ),
    "a long context": (
        {"top_k": 3, "context": CONTEXT | {"max_prompt_tokens": 100_000}},
        {},
        "batch.micro_batch_tokens",
        "the teacher may read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_remedy(case: str, tmp_path: Path) -> None:
    distillation, sections, key, words = REFUSED[case]
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, 2 if case == "pp" else 1, distillation=distillation, **sections)
    problem = only_problem(caught.value)
    assert problem.key == key
    assert words in problem.message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": 0.3}, "does nothing with divergence=reverse_kl"),
        ({"tail": "renormalize"}, "does nothing where all words are compared"),
        ({"context": CONTEXT}, "context needs words that teachers give"),
        ({"teachers": {"math": "reference"}}, "teachers needs words that teachers give"),
        ({"top_k": 3, "context": {"template": "{prompt}"}}, "names no column besides the prompt"),
        ({"top_k": 3, "teachers": {"a": "b"}, "teacher": "c"}, "teacher=c does nothing"),
        ({"align": "text"}, "align=text needs words that teachers give"),
        ({"top_k": 3, "align": "text", "server": SERVER}, "align=text needs the tokenizer of the teacher"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        plan(tmp_path, distillation=settings)


def test_all_words_can_only_be_compared_of_vocabularies_of_one_size(tmp_path: Path) -> None:
    models = {"policy": write_model(tmp_path / "small", vocab_size=5000)}
    models["reference"] = write_model(tmp_path / "padded", vocab_size=5120)
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, models=models)
    assert str(caught.value) == (
        "algorithm.distillation.top_k: is null, which compares all words, but models have logits for different numbers "
        "of words, 5,000 of 'policy' and 5,120 of 'reference': set it, such as 64, so that the teacher gives its "
        "likeliest words"
    )
    assert plan(tmp_path, models=models, distillation={"top_k": 64}).nodes


def test_a_teacher_with_another_tokenizer_is_asked_by_text(tmp_path: Path) -> None:
    models = dict[str, str]()
    for role, word in (("policy", "a"), ("reference", "b")):
        models[role] = write_model(tmp_path / role, vocab_size=5000)
        vocabulary = {"model": {"vocab": {"<end>": 0, word: 1}}}
        (tmp_path / role / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"differ in the id of 'a'.*unless algorithm.distillation.align is text"):
        plan(tmp_path, models=models, distillation={"top_k": 4})
    found = plan(tmp_path, models=models, distillation={"top_k": 4, "align": "text"})
    assert "rows" in found["teacher"].reads
