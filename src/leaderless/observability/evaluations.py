"""Evaluations by packages of others: what they have measured, in the folder of a run. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from leaderless.observability.report.unchecked_values import as_list, as_mapping, as_number, as_step, as_text

FOLDER = "evaluations"
"""Folder of a run with one folder for each evaluation."""
FILE_NAME = "evaluation.json"
"""Name of the file with an evaluation; what the package itself has written lies next to it."""
_STDERR = "_stderr"


@dataclass(frozen=True)
class TaskScore:
    """One number that a package has measured.

    Attributes:
        task: Name of the task, or of a group of tasks.
        metric: Name of the metric, with the filter of answers where there is one.
        value: Value of the metric.
        standard_error: Standard error of the value; None where the package gives none.
        num_rows: Number of rows that were answered; None if unknown.
        num_shots: Number of examples before each question; None if unknown.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None = None
    num_rows: int | None = None
    num_shots: int | None = None


@dataclass(frozen=True)
class TaskEvaluation:
    """All numbers of one evaluation.

    Attributes:
        by: Package that has evaluated, with its version.
        model: Name of the model.
        weights: Checkpoint or folder with the weights.
        time: Time of the end, in ISO's format.
        seconds: Time that it took, without the loading of the model.
        arguments: Settings of the package.
        scores: Numbers that it has measured.
    """

    by: str
    model: str
    weights: str
    time: str
    seconds: float
    arguments: Mapping[str, object]
    scores: Sequence[TaskScore]

    def write(self, folder: Path) -> None:
        """Write it into its folder."""
        from leaderless.observability.run_directory import write_atomically  # needs libraries that reading does not

        write_atomically(folder / FILE_NAME, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")


def lm_eval_scores(results: Mapping[str, object]) -> list[TaskScore]:
    """The numbers in results of lm-eval, whose metrics have names such as `acc,none` and `acc_stderr,none`."""
    shots, counts = as_mapping(results.get("n-shot")), as_mapping(results.get("n-samples"))
    found: list[TaskScore] = []
    for task, numbers in as_mapping(results.get("results")).items():
        measured = as_mapping(numbers)
        rows = as_step(as_mapping(counts.get(task)).get("effective"))
        for name, value in measured.items():
            metric, comma, kind = name.partition(",")
            number = as_number(value)
            if not comma or metric.endswith(_STDERR) or number is None:
                continue
            shown = metric if kind == "none" else f"{metric} ({kind})"
            error = as_number(measured.get(f"{metric}{_STDERR},{kind}"))
            found.append(TaskScore(task, shown, number, error, rows, as_step(shots.get(task))))
    return found


def read_evaluations(run: Path) -> Iterator[TaskEvaluation]:
    """Yield the evaluations in the folder of a run, the newest first; damaged files are left out."""
    found = []
    for file in (run / FOLDER).glob(f"*/{FILE_NAME}"):
        try:
            given = as_mapping(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            continue
        found.append(_read(given))
    yield from sorted(found, key=lambda one: one.time, reverse=True)


def _read(given: Mapping[str, object]) -> TaskEvaluation:
    scores = []
    for one in map(as_mapping, as_list(given.get("scores"))):
        if (value := as_number(one.get("value"))) is not None:
            counts = as_step(one.get("num_rows")), as_step(one.get("num_shots"))
            error = as_number(one.get("standard_error"))
            scores.append(TaskScore(as_text(one.get("task")), as_text(one.get("metric")), value, error, *counts))
    by, model, weights, time = (as_text(given.get(name)) for name in ("by", "model", "weights", "time"))
    seconds = as_number(given.get("seconds")) or 0.0
    return TaskEvaluation(by, model, weights, time, seconds, as_mapping(given.get("arguments")), scores)


def score_row(score: TaskScore) -> tuple[str, str, str, str, str]:
    """A number as the row of a table: task, metric, value with standard error, rows, examples before each question."""
    value = f"{score.value:.4f}" + ("" if score.standard_error is None else f" ± {score.standard_error:.4f}")
    return score.task, score.metric, value, as_text(score.num_rows), as_text(score.num_shots)


ROW_TITLES = ("Task", "Metric", "Value", "Rows", "Examples")
"""Titles of the columns of `score_row`."""
