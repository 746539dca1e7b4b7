"""Tries the rewards of a recipe on rows of its data, in this process. Imports no torch."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from leaderless.config import Recipe, RecipeError
from leaderless.config.data import DATASET_COLUMN, DatasetConfig
from leaderless.data.sources.files import find_files
from leaderless.data.sources.row_sources import Row, plain_row, read_lines
from leaderless.observability.hidden_values import without_secrets
from leaderless.rewards.judges.judge import Judge
from leaderless.rewards.protocol import Reward, RewardInput, compute, describe, timed_out
from leaderless.rewards.registry import make_rewards


@dataclass(frozen=True)
class Score:
    """Value that one reward found for a response.

    Attributes:
        value: Value before weighting; None where the reward failed.
        answer: Final answer found in the response.
        error: Reason why training would count the reward as failed, in one line; empty where it would not.
        trace: The error with its traceback, as Python prints it.
        seconds: Time that the reward took.
        said: Words of a judge.
    """

    value: float | None
    answer: str | None
    error: str
    trace: str
    seconds: float
    said: str = ""


@dataclass(frozen=True)
class RewardTrial:
    """A response and what it is worth.

    Attributes:
        row: Number of the row, from 1.
        kind: Origin of the response: `given`, `expected` or `empty`.
        sample: Input of the rewards.
        scores: Results of the rewards that apply to the row, by name.
        reward: Weighted sum; None where a reward failed or none applies.
    """

    row: int
    kind: str
    sample: RewardInput
    scores: Mapping[str, Score]
    reward: float | None


def try_rewards(recipe: Recipe, num_rows: int, responses: Sequence[str] = ()) -> Iterator[RewardTrial]:
    """Grade responses to the first rows of the training data.

    Args:
        recipe: Recipe with the rewards and the data.
        num_rows: Number of rows of each dataset, at least 1.
        responses: One response for each row, or one for all; without any, the row's expected answer where it is text,
            and an empty response.

    Raises:
        RecipeError: A reward or the data cannot be loaded.
        ValueError: The numbers of responses and rows do not fit.
    """
    rewards, options = make_rewards(recipe.reward, in_worker=True), recipe.reward.options()
    rows = list(training_rows(recipe, num_rows))
    if 1 < len(responses) < len(rows):
        raise ValueError(f"there are {len(responses)} responses for {len(rows)} rows: give one, or one for each row")
    for number, row in enumerate(rows):
        config = recipe.data.train_set_of(row)
        answer = row.get(config.answer) if config.answer else None
        if config.answer and config.answer not in row:
            raise RecipeError.at("data.train.answer", f"row {number + 1} has no column '{config.answer}'")
        if responses:
            made = {"given": responses[number if len(responses) > 1 else 0]}
        else:
            made = ({"expected": str(answer)} if isinstance(answer, str | int | float) else {}) | {"empty": ""}
        applying = recipe.reward.applying(recipe.data.source_of(row))
        samples = {
            kind: RewardInput(row.get(config.prompt), response, answer, row, is_truncated=False, group=number)
            for kind, response in made.items()
        }
        found = {name: _scores(rewards[name], samples, options[name].timeout_s) for name in applying}
        for kind, sample in samples.items():
            scores = {name: found[name][kind] for name in applying}
            is_graded = bool(scores) and not any(score.error for score in scores.values())
            total = sum(options[name].weight * (score.value or 0.0) for name, score in scores.items())
            yield RewardTrial(number + 1, kind, sample, scores, total if is_graded else None)


def read_responses(path: Path) -> list[str]:
    """Responses from a file: JSON lines, each a text or an object with `response`, or one response per line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix != ".jsonl":
        return lines
    responses: list[str] = []
    for number, line in enumerate(lines):
        value = json.loads(line)
        text = value.get("response") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number + 1} must be a text, or an object whose `response` is one")
        responses.append(text)
    return responses


def _scores(reward: Reward, samples: Mapping[str, RewardInput], timeout_s: float) -> dict[str, Score]:
    """Values that one reward finds for the responses to a row, by their kind."""
    if not isinstance(reward, Judge):
        return {kind: _score(reward, sample, timeout_s) for kind, sample in samples.items()}
    scores: dict[str, Score] = {}
    for kind, judged in zip(samples, reward.grade([*samples.values()]), strict=True):
        outcome, said = judged.outcome, str(judged.notes.get("said", ""))
        value = None if outcome.error else outcome.value
        scores[kind] = Score(value, None, outcome.error or "", "", outcome.seconds, said)
    return scores


def _score(reward: Reward, sample: RewardInput, timeout_s: float) -> Score:
    begin = time.perf_counter()
    try:
        outcome = compute(reward, sample)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary of the user's code: shown to the user
        return Score(None, None, describe(error), _trace(error), time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    late = timed_out(timeout_s).error if seconds > timeout_s else None
    return Score(outcome.value, outcome.answer, late or "", "", seconds)


def _trace(error: BaseException) -> str:
    """The traceback, from the user's function on."""
    place = error.__traceback__
    while place and place.tb_next and Path(place.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        place = place.tb_next
    return without_secrets("".join(traceback.format_exception(type(error), error, place)))


def training_rows(recipe: Recipe, num_rows: int) -> Iterator[Row]:
    """The first rows of each dataset, as they would be read to train on."""
    for key, config in recipe.data.train_sets().items():
        name = {} if isinstance(recipe.data.train, DatasetConfig) else {DATASET_COLUMN: key.rpartition(".")[2]}
        for row in islice(_rows(config, key), num_rows):
            yield row | name


def _rows(config: DatasetConfig, key: str) -> Iterator[Row]:
    files, columns = find_files(config, key), config.wanted_columns()
    if files is None:
        from leaderless.data.sources.hub import HubStream  # imports torch

        yield from (row for _, row in HubStream(config).rows())
    for file in files or ():
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            for batch in pq.ParquetFile(file).iter_batches(batch_size=64):
                for values in batch.to_pylist():
                    kept = {name: value for name, value in values.items() if columns is None or name in columns}
                    yield plain_row(kept, str(file))
        else:
            yield from (row for _, row in read_lines(file, columns))
