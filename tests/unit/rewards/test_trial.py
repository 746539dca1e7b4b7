"""Rewards are tried on rows of the data before training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.recipes import make_recipe
from tests.unit.rewards.calls import own

from leaderless.config import Recipe, RecipeError
from leaderless.rewards.dry_run import RewardTrial, read_responses, try_rewards

ROWS = [{"question": f"{i}+1", "answer": str(i + 1), "kind": "even" if i % 2 == 0 else "odd"} for i in range(4)]


def recipe(path: Path, reward: dict[str, object], **data: object) -> Recipe:
    train = {"path": str(path), "prompt": "question", "answer": "answer", **data}
    return make_recipe(data={"train": train}, reward=reward)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def brief(trials: list[RewardTrial]) -> list[tuple[int, str, float | None]]:
    return [(trial.row, trial.kind, trial.reward) for trial in trials]


def test_the_expected_answer_and_an_empty_one_are_graded(rows: Path) -> None:
    trials = list(try_rewards(recipe(rows, {"exact_match": 2.0}), 2))
    assert brief(trials) == [(1, "expected", 2.0), (1, "empty", 0.0), (2, "expected", 2.0), (2, "empty", 0.0)]
    assert (trials[2].sample.prompt, trials[2].sample.response, trials[2].sample.row) == ("1+1", "2", ROWS[1])
    assert (trials[0].scores["exact_match"].value, trials[0].scores["exact_match"].answer) == (1.0, "1")


def test_given_responses_are_graded_row_by_row_or_one_for_all(rows: Path) -> None:
    config = recipe(rows, {"exact_match": 1.0})
    assert brief(list(try_rewards(config, 3, ["1", "x", "3"]))) == [(1, "given", 1), (2, "given", 0), (3, "given", 1)]
    assert [trial.reward for trial in try_rewards(config, 3, ["2"])] == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="2 responses for 3 rows"):
        list(try_rewards(config, 3, ["1", "2"]))


def test_an_error_comes_with_the_traceback_of_the_user_s_code(rows: Path) -> None:
    name = own("what_is_said")
    (trial,) = try_rewards(recipe(rows, {name: 1.0, "exact_match": 1.0}), 1, ["error"])
    score = trial.scores[name]
    assert trial.reward is None
    assert score.value is None
    assert score.error.startswith("KeyError: 'missing' (reward_functions.py:")
    assert "Traceback" in score.trace
    assert "reward_functions.py" in score.trace
    assert "grading.py" not in score.trace
    assert trial.scores["exact_match"].value == 0.0


def test_a_reward_that_returns_no_number_is_an_error(rows: Path) -> None:
    (trial,) = try_rewards(recipe(rows, {own("what_is_said"): 1.0}), 1, ["text"])
    assert "must return a number" in trial.scores[own("what_is_said")].error


def test_a_reward_over_its_time_limit_would_fail(rows: Path) -> None:
    name = own("sleep_as_told")
    (trial,) = try_rewards(recipe(rows, {name: {"timeout_s": 0.01}}), 1, ["0.05"])
    assert trial.scores[name].error == "TimeoutError: took longer than 0.01 s"
    assert trial.scores[name].seconds >= 0.05
    assert trial.reward is None


def test_rewards_apply_to_their_sources(rows: Path) -> None:
    config = recipe(rows, {"exact_match": {"sources": ["even"]}}, source="kind")
    assert [(list(trial.scores), trial.reward) for trial in try_rewards(config, 2, ["1"])] == [
        (["exact_match"], 1.0),
        ([], None),
    ]


def test_rows_come_from_parquet_and_compressed_files_and_mixtures(tmp_path: Path, rows: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.read_bytes()))
    for name in ("rows.parquet", "rows.jsonl.gz"):
        stream = {"streaming": True} if name.endswith(".gz") else {}
        trials = list(try_rewards(recipe(tmp_path / name, {"exact_match": 1.0}, **stream), 4, ["1"]))
        assert [trial.sample.row for trial in trials] == ROWS
    part = {"path": str(rows), "prompt": "question", "answer": "answer"}
    mixture = make_recipe(data={"train": {"a": part, "b": part}}, reward={"exact_match": {"sources": ["b"]}})
    assert [len(trial.scores) for trial in try_rewards(mixture, 1, ["1"])] == [0, 1]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rewards_see_the_columns_that_training_keeps(tmp_path: Path, rows: Path, suffix: str) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    config = recipe(tmp_path / f"rows.{suffix}", {"exact_match": 1.0}, columns=["question"])
    (trial,) = try_rewards(config, 1, ["1"])
    assert trial.sample.row == {"question": "0+1", "answer": "1"}


def test_data_that_cannot_be_read_are_an_error_of_the_recipe(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(RecipeError, match="no column 'solution'"):
        list(try_rewards(recipe(rows, {"exact_match": 1.0}, answer="solution"), 1))
    for text, rule in (("{", "is not JSON"), ("[1]", "must be an object")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(RecipeError, match=rule):
            list(try_rewards(recipe(tmp_path / "bad.jsonl", {"exact_match": 1.0}), 1))


def test_responses_are_read_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("one\ntwo\n")
    (tmp_path / "r.jsonl").write_text('"one"\n{"response": "two\\nlines", "other": 1}\n')
    assert read_responses(tmp_path / "r.txt") == ["one", "two"]
    assert read_responses(tmp_path / "r.jsonl") == ["one", "two\nlines"]
    (tmp_path / "r.jsonl").write_text("5\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:1 must be a text"):
        read_responses(tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").write_text('"one"\ntwo\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is not JSON"):
        read_responses(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("name", "content"), [("r.parquet", b"PAR1 "), ("r.jsonl.gz", b"{}"), ("r", b"\xff"), ("r", b"")]
)
def test_a_file_that_has_no_responses_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="must be JSON lines"):
        read_responses(tmp_path / name)
