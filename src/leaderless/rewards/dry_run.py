"""Tries the rewards of a recipe on rows of its data, in this process. Imports no torch."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.data import DatasetConfig
from leaderless.data.sources.files import find_files
from leaderless.data.sources.row_sources import Row, plain_row, read_lines
from leaderless.observability.hidden_values import without_secrets
from leaderless.rewards.judges.judge import Judge
from leaderless.rewards.protocol import (
    AnyReward,
    GradingOutcome,
    RewardInput,
    compute,
    describe,
    takes_batch,
    timed_out,
)
from leaderless.rewards.registry import make_rewards

NOT_TEXT = {".gz", ".parquet", ".zst"}
"""Endings of files that could be taken for data, but not for responses."""


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


def try_rewards(
    recipe: Recipe, num_rows: int, responses: Sequence[str] = (), on_score: Callable[[str], None] = lambda _: None
) -> list[RewardTrial]:
    """Grade responses to the first rows of the training data.

    Args:
        recipe: Recipe with the rewards and the data.
        num_rows: Number of rows of each dataset, at least 1.
        responses: One response for each row, or one for all; without any, the row's expected answer where it is text,
            and an empty response.
        on_score: Function that is called with the name of a reward after each response that it has graded.

    Raises:
        RecipeError: A reward or the data cannot be loaded.
        ValueError: The numbers of responses and rows do not fit.
    """
    rewards, options = make_rewards(recipe.reward, in_worker=True), recipe.reward.options()
    rows = list(training_rows(recipe, num_rows))
    if 1 < len(responses) < len(rows):
        raise ValueError(f"there are {len(responses)} responses for {len(rows)} rows: give one, or one for each row")
    samples: list[tuple[int, str, RewardInput]] = []
    work: dict[str, list[int]] = {name: [] for name in options}
    for number, row in enumerate(rows):
        config = recipe.data.train_set_of(row)
        needs_prompt = not (recipe.task_section or "{" in config.template or config.preferences)
        named = {"prompt": config.prompt if needs_prompt else None, "answer": config.answer, "source": config.source}
        for setting, column in named.items():
            if column is not None and column not in row:
                problem = f"row {number + 1} has no column '{column}'{nearest(column, row)}"
                raise RecipeError.at(f"data.train.{setting}", problem)
        given = responses[number if len(responses) > 1 else 0] if responses else None
        for kind, sample in inputs_of_row(recipe, row, number, given).items():
            for name in recipe.reward.applying(recipe.data.source_of(row)):
                work[name].append(len(samples))
            samples.append((number + 1, kind, sample))
    found: list[dict[str, Score]] = [{} for _ in samples]
    for name, places in work.items():
        scores = _scores(rewards[name], [samples[place][2] for place in places], options[name].timeout_s)
        for place, score in zip(places, scores, strict=True):
            found[place][name] = score
            on_score(name)
    trials: list[RewardTrial] = []
    for one, scores_of_one in zip(samples, found, strict=True):
        is_graded = bool(scores_of_one) and not any(score.error for score in scores_of_one.values())
        total = sum(options[name].weight * (score.value or 0.0) for name, score in scores_of_one.items())
        trials.append(RewardTrial(*one, scores_of_one, total if is_graded else None))
    return trials


def inputs_of_row(recipe: Recipe, row: Row, number: int, given: str | None = None) -> dict[str, RewardInput]:
    """Inputs of rewards for a row, by the origin of the response, without a model.

    Args:
        recipe: Recipe with the data.
        row: Row of its training data.
        number: Number of the row, from 0.
        given: Response; None for the row's expected answer where it is text, and an empty response.
    """
    config = recipe.data.train_set_of(row)
    answer = row.get(config.answer) if config.answer else None
    made = {"given": given} if given is not None else {"empty": ""}
    if given is None and isinstance(answer, str | int | float):
        made = {"expected": str(answer), **made}
    prompt = row.get(config.prompt)
    return {
        kind: RewardInput(prompt, response, answer, row, is_truncated=False, group=number)
        for kind, response in made.items()
    }


def read_responses(path: Path) -> list[str]:
    """Responses from a file: JSON lines, each a text or an object with `response`, or one response per line.

    Raises:
        ValueError: The file is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        lines = []
    if not lines or path.suffix in NOT_TEXT:
        raise ValueError(f"{path} must be JSON lines (.jsonl), or text with a response in each line")
    if path.suffix != ".jsonl":
        return lines
    responses: list[str] = []
    for number, line in enumerate(lines):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number + 1} is not JSON: {error}") from error
        text = value.get("response") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number + 1} must be a text, or an object whose `response` is one")
        responses.append(text)
    return responses


def _scores(reward: AnyReward, samples: Sequence[RewardInput], timeout_s: float) -> Iterator[Score]:
    """Values that one reward finds for responses, in order; a judge and a batch reward get all of them at once."""
    if isinstance(reward, Judge):
        judged = [(one.outcome, str(one.notes.get("said", ""))) for one in reward.grade(samples)]
        yield from (_score_of(outcome, outcome.error or "", outcome.seconds, said) for outcome, said in judged)
        return
    calls = [[sample] for sample in samples]
    if takes_batch(reward):
        calls = [[*samples]] * bool(samples)
    for call in calls:
        yield from _scores_of_call(reward, call, timeout_s)


def _scores_of_call(reward: AnyReward, samples: Sequence[RewardInput], timeout_s: float) -> list[Score]:
    begin = time.perf_counter()
    try:
        outcomes = compute(reward, samples)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary of the user's code: shown to the user
        failed = Score(None, None, describe(error), _trace(error), (time.perf_counter() - begin) / len(samples))
        return [failed] * len(samples)
    seconds = time.perf_counter() - begin
    late = timed_out(timeout_s, len(samples)) if seconds > timeout_s else ""
    return [_score_of(one, late or one.error or "", seconds / len(samples)) for one in outcomes]


def _score_of(outcome: GradingOutcome, error: str, seconds: float, said: str = "") -> Score:
    value = None if outcome.error else outcome.value
    return Score(value, outcome.answer, error, "", seconds, said)


def _trace(error: BaseException) -> str:
    """The traceback, from the user's function on."""
    place = error.__traceback__
    while place and place.tb_next and Path(place.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        place = place.tb_next
    return without_secrets("".join(traceback.format_exception(type(error), error, place)))


def training_rows(recipe: Recipe, num_rows: int) -> Iterator[Row]:
    """The first rows of each dataset, as they would be read to train on."""
    for key, config in recipe.data.train_sets().items():
        for row in islice(_rows(config, key), num_rows):
            yield recipe.data.named(key, row)


def _rows(config: DatasetConfig, key: str) -> Iterator[Row]:
    files, columns = find_files(config, key), config.wanted_columns()
    if files is None:
        from leaderless.data.sources.hub import HubStream  # imports torch

        yield from (row for _, row in HubStream(config).rows())
    for file in files or ():
        if file.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                for batch in pq.ParquetFile(file).iter_batches(batch_size=64):
                    for values in batch.to_pylist():
                        kept = {name: value for name, value in values.items() if columns is None or name in columns}
                        yield plain_row(kept, str(file))
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise RecipeError.at("data", f"{file} is not a readable Parquet file: {error}") from error
        else:
            yield from (row for _, row in read_lines(file, columns))
