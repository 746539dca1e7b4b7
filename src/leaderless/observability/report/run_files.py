"""Everything that a run directory holds about its run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from leaderless.observability.evaluations import TaskEvaluation, read_evaluations
from leaderless.observability.report.curves import Series, collect_series, duration_s, last_rows
from leaderless.observability.report.samples import BUDGET_BYTES, JudgeView, Samples, read_samples
from leaderless.observability.report.unchecked_values import (
    as_list,
    as_mapping,
    as_number,
    as_text,
    clean_svg,
    parse_json,
    parse_json_lines,
)

Settings = Mapping[tuple[str, ...], str]
"""Settings of a recipe as text, by path."""
HELD_OUT_BYTES = 1_000_000
"""Largest size of the samples of held-out prompts on a page, without tokens."""


@dataclass(frozen=True)
class RunFiles:
    """Contents of a run directory; a file that is missing leaves its attribute empty.

    The picture is safe to stand in the page. The series are metrics by name. Samples, of training and of held-out
    prompts, are those that the page shows. Evaluations are those of other packages, the newest first. Notes say what is
    missing or could not be read.
    """

    directory: Path
    recipe_text: str
    settings: Settings
    judge: JudgeView
    plan: Mapping[str, object]
    picture: str
    series: Mapping[str, Series]
    steps: Sequence[int]
    duration_s: float | None
    last_logged: datetime | None
    samples: Samples
    held_out: Samples
    events: Sequence[Mapping[str, object]]
    evaluations: Sequence[TaskEvaluation]
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """Name of the run."""
        return as_text(self.plan.get("recipe")) or self.settings.get(("name",), "") or self.directory.resolve().name

    def matching(self, *patterns: str) -> dict[str, Series]:
        """Metrics that match names or patterns, in which `*` stands for any text, in the order of these."""
        found: dict[str, Series] = {}
        for pattern in patterns:
            regex = re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
            found |= {name: one for name, one in self.series.items() if name not in found and regex.fullmatch(name)}
        return found


@dataclass(frozen=True)
class Logged:
    """Contents of the files of metrics: metrics by name, all steps, and the seconds that they took."""

    series: Mapping[str, Series]
    steps: Sequence[int]
    duration_s: float | None


def read_run(
    directory: Path, logged: Logged | None = None, budgets: tuple[int, int] | None = (BUDGET_BYTES, HELD_OUT_BYTES)
) -> RunFiles:
    """Read a run directory, or as much of it as there is.

    Args:
        directory: Folder of the run.
        logged: Contents of the files of metrics, if they are known already.
        budgets: Largest sizes of the samples of training and of held-out prompts; None for no samples.
    """
    notes: list[str] = []
    recipe_text = _read(directory / "config.yaml", "the recipe", notes)
    plan = _read_plan(directory / "plan.json", notes)
    picture = _read_picture(directory / "plan.svg", notes)
    metrics, events = directory / "metrics.jsonl", directory / "events.jsonl"
    logged = _read_logged(directory, notes) if logged is None else logged
    settings = flatten_recipe(recipe_text)
    judge = _judge(settings)
    episodes = directory / "episodes"
    samples = held_out = Samples()
    if budgets is not None:
        samples = read_samples(directory / "samples", judge, budgets[0], episodes=episodes)
        held_out = read_samples(directory / "samples", judge, budgets[1], "evaluation", episodes)
    nodes = map(as_mapping, as_list(plan.get("nodes")))
    is_recorded = not plan or any(node.get("run") == "record" for node in nodes)  # without a plan, it is assumed
    if budgets is not None and not samples.num_recorded_steps and is_recorded:
        notes.append("samples/ holds no recorded samples, so none can be shown.")
    has_events = events.exists() and events.stat().st_size > 0  # most runs have none
    events_text = _read(events, "its failures and the events of guards", notes) if has_events else ""
    return RunFiles(
        directory,
        recipe_text,
        settings,
        judge,
        plan,
        picture,
        logged.series,
        logged.steps,
        logged.duration_s,
        datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if logged.steps and metrics.exists() else None,
        samples,
        held_out,
        parse_json_lines(events_text, events.name, notes),
        tuple(read_evaluations(directory)),
        (*notes, *samples.problems, *held_out.problems),
    )


def _read_logged(directory: Path, notes: list[str]) -> Logged:
    metrics_text = _read(directory / "metrics.jsonl", "the curves", notes)
    rows = last_rows(parse_json_lines(metrics_text, "metrics.jsonl", notes))
    for log in sorted(directory.glob("metrics-*.jsonl")):
        more = last_rows(parse_json_lines(_read(log, "some of the curves", notes), log.name, notes))
        # Another loop may be ahead of the one that trains, and only held-out prompts are answered before it begins.
        rows = {step: {**more.get(step, {}), **rows.get(step, {})} for step in sorted(rows.keys() | more.keys() & {0})}
    if metrics_text.strip() and not rows:
        notes.append("metrics.jsonl holds no step yet, so there are no curves.")
    return Logged(collect_series(rows), tuple(rows), duration_s(rows))


def flatten_recipe(text: str) -> dict[tuple[str, ...], str]:
    """Settings of a resolved recipe as text, by path such as `("batch", "prompts_per_step")`.

    Settings without a value are left out. A broken recipe has no settings.
    """
    settings: dict[tuple[str, ...], str] = {}

    def walk(path: tuple[str, ...], value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk((*path, str(key)), inner)
        elif value is not None and not isinstance(value, list):
            settings[path] = str(value)

    try:
        walk((), yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return settings


def _judge(settings: Settings) -> JudgeView:
    """A judge by `evaluation.metric`, or else by the reward with the largest weight."""
    weights = {
        path[1]: _number(value) for path, value in settings.items() if path[0] == "reward" and path[2:] == ("weight",)
    }
    heaviest = max(weights, key=lambda name: weights[name], default=None)
    correct_at = settings.get(("evaluation", "correct_at"), "1.0")
    return JudgeView(settings.get(("evaluation", "metric")) or heaviest, _number(correct_at))


def _number(text: str) -> float:
    try:
        number = as_number(float(text))
    except ValueError:
        number = None
    return 1.0 if number is None else number


def _read(path: Path, content: str, notes: list[str]) -> str:
    """The text of a file; if there is none, a note says what is missing from the page."""
    text, problem = "", "is empty"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problem = "is not there"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if not text.strip():
        notes.append(f"{path.name} {problem}, so {content} cannot be shown.")
    return text


def _read_plan(path: Path, notes: list[str]) -> Mapping[str, object]:
    text = _read(path, "the plan", notes)
    try:
        plan = as_mapping(parse_json(text)) if text.strip() else {}
    except ValueError:
        plan = {}
    if text.strip() and not plan:
        notes.append("plan.json is not a JSON object, so the plan cannot be shown.")
    return plan


def _read_picture(path: Path, notes: list[str]) -> str:
    text = _read(path, "the picture of the workflow", notes)
    try:
        return clean_svg(text) if text.strip() else ""
    except ValueError as error:
        notes.append(f"plan.svg {error}, so the picture of the workflow cannot be shown.")
        return ""
