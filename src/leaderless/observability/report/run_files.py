"""Everything that a run directory says about its run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from leaderless.observability.report.curves import Series, collect_series, duration_s, last_rows
from leaderless.observability.report.picture import clean_svg
from leaderless.observability.report.samples import Judge, Samples, read_samples
from leaderless.observability.report.untrusted import (
    as_list,
    as_mapping,
    as_number,
    as_text,
    parse_json,
    parse_json_lines,
    read_text,
)

Settings = Mapping[tuple[str, ...], str]
"""Settings of a recipe as text, by their path."""
HELD_OUT_BYTES = 1_000_000
"""Largest size of the samples of held-out prompts on a page, without tokens."""


@dataclass(frozen=True)
class RunFiles:
    """What was found in a run directory; a file that is missing leaves its attribute empty.

    Attributes:
        directory: The run directory.
        recipe_text: `config.yaml`.
        settings: Settings of the recipe.
        plan: `plan.json`.
        picture: `plan.svg`, safe to stand in the page.
        series: Metrics by name.
        steps: Steps of `metrics.jsonl`, ascending.
        duration_s: Seconds that the steps took; None if no line says.
        last_logged: Time at which `metrics.jsonl` was last written; None if it was not.
        samples: Recorded samples of training, as far as the page shows them.
        held_out: Those of held-out prompts.
        events: Lines of `events.jsonl`, in order.
        notes: Sentences on what is missing or could not be read.
    """

    directory: Path
    recipe_text: str
    settings: Settings
    plan: Mapping[str, object]
    picture: str
    series: Mapping[str, Series]
    steps: Sequence[int]
    duration_s: float | None
    last_logged: datetime | None
    samples: Samples
    held_out: Samples
    events: Sequence[Mapping[str, object]]
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """Name of the run."""
        return as_text(self.plan.get("recipe")) or self.settings.get(("name",), "") or self.directory.resolve().name

    @property
    def workflow(self) -> str:
        """Name of its workflow; empty when not known."""
        return as_text(self.plan.get("workflow")) or self.settings.get(("workflow",), "")

    @property
    def models(self) -> Mapping[str, str]:
        """Path of the model of each role that the recipe gives one."""
        return {
            path[1]: value for path, value in self.settings.items() if path[0] == "models" and path[2:] == ("path",)
        }

    @property
    def planned_steps(self) -> str:
        """Steps that the recipe asks for; empty when not known."""
        return self.settings.get(("steps",), "")

    @property
    def judge(self) -> Judge:
        """How the recipe tells correct responses from wrong ones."""
        return judge_of(self.settings)

    def matching(self, *patterns: str) -> dict[str, Series]:
        """Metrics by name or pattern, in the order of the patterns.

        Args:
            patterns: Patterns in which `*` stands for any text.
        """
        found: dict[str, Series] = {}
        for pattern in patterns:
            regex = re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
            found |= {name: one for name, one in self.series.items() if name not in found and regex.fullmatch(name)}
        return found


def read_run(directory: Path) -> RunFiles:
    """Read a run directory.

    Args:
        directory: A folder as a run writes it, or as much of it as there is.
    """
    notes: list[str] = []
    recipe_text = _read(directory / "config.yaml", "the recipe", notes)
    plan = _read_plan(directory / "plan.json", notes)
    picture = _read_picture(directory / "plan.svg", notes)
    metrics = directory / "metrics.jsonl"
    metrics_text = _read(metrics, "the curves", notes)
    lines, num_broken = parse_json_lines(metrics_text)
    rows = last_rows(lines)
    if num_broken:
        notes.append(f"metrics.jsonl: {num_broken} lines are no JSON objects and were passed over.")
    if metrics_text.strip() and not rows:
        notes.append("metrics.jsonl holds no step yet, so there are no curves.")
    settings = flatten_recipe(recipe_text)
    samples = read_samples(directory / "samples", judge_of(settings))
    held_out = read_samples(directory / "samples", judge_of(settings), HELD_OUT_BYTES, "evaluation")
    if not samples.num_recorded_steps and _is_recorded(plan):
        notes.append("samples/ holds no recorded samples, so none can be shown.")
    return RunFiles(
        directory,
        recipe_text,
        settings,
        plan,
        picture,
        collect_series(rows),
        tuple(rows),
        duration_s(rows),
        datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if rows else None,
        samples,
        held_out,
        _read_events(directory / "events.jsonl", notes),
        (*notes, *samples.problems, *held_out.problems),
    )


def flatten_recipe(text: str) -> dict[tuple[str, ...], str]:
    """Settings of a recipe as text by their path, as `("batch", "prompts_per_step")`; what is not set is left out.

    Args:
        text: A resolved recipe; one that is broken has no settings.
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


def judge_of(settings: Settings) -> Judge:
    """How a recipe tells correct responses from wrong ones: by `evaluation.metric`, else the reward of largest weight.

    Args:
        settings: Settings of the recipe.
    """
    weights = {
        path[1]: _number(value) for path, value in settings.items() if path[0] == "reward" and path[2:] == ("weight",)
    }
    heaviest = max(weights, key=lambda name: weights[name], default=None)
    correct_at = settings.get(("evaluation", "correct_at"), "1.0")
    return Judge(settings.get(("evaluation", "metric")) or heaviest, _number(correct_at))


def _number(text: str) -> float:
    try:
        number = as_number(float(text))
    except ValueError:
        number = None
    return 1.0 if number is None else number


def _read(path: Path, content: str, notes: list[str]) -> str:
    """The text of a file; without any, a note says what is lost."""
    text, problem = "", "is empty"
    try:
        text = read_text(path)
    except FileNotFoundError:
        problem = "is not there"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if not text.strip():
        notes.append(f"{path.name} {problem}, so {content} cannot be shown.")
    return text


def _read_events(path: Path, notes: list[str]) -> Sequence[Mapping[str, object]]:
    """Failures, restarts and events of guards; most runs have none."""
    if not path.exists() or not path.stat().st_size:
        return ()
    lines, num_broken = parse_json_lines(_read(path, "its failures and the events of guards", notes))
    if num_broken:
        notes.append(f"events.jsonl: {num_broken} lines are no JSON objects and were passed over.")
    return lines


def _read_plan(path: Path, notes: list[str]) -> Mapping[str, object]:
    text = _read(path, "the plan", notes)
    try:
        plan = as_mapping(parse_json(text)) if text.strip() else {}
    except ValueError:
        plan = {}
    if text.strip() and not plan:
        notes.append("plan.json is no JSON object, so the plan cannot be shown.")
    return plan


def _is_recorded(plan: Mapping[str, object]) -> bool:
    """Whether a node records samples; taken for granted without a plan."""
    return not plan or any(as_mapping(node).get("run") == "record" for node in as_list(plan.get("nodes")))


def _read_picture(path: Path, notes: list[str]) -> str:
    text = _read(path, "the picture of the workflow", notes)
    try:
        return clean_svg(text) if text.strip() else ""
    except ValueError as error:
        notes.append(f"plan.svg {error}, so the picture of the workflow cannot be shown.")
        return ""
