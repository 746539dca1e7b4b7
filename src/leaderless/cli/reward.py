"""`leaderless reward`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from leaderless.config import RecipeError
from leaderless.observability.console import console
from leaderless.planner.workflow import load_recipe
from leaderless.rewards.dry_run import RewardTrial, Score, read_responses, try_rewards
from leaderless.run.settings import recipe_path

MAX_CELL_CHARACTERS = 60
"""Length at which prompts, answers and responses are cut in the table."""
MAX_TRACES = 3
"""Largest number of different errors that are shown with their tracebacks."""


def reward(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of each dataset to try.")] = 5,
    response: Annotated[str | None, typer.Option(help="A response to grade for every row.")] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            help="A file with a response for each row: JSON lines (texts or objects with `response`) or text."
        ),
    ] = None,
) -> None:
    """Try the rewards of a recipe on its data, in this process; without responses, grade the expected and an empty one.

    Ends with exit code 1 if a reward failed.
    """
    if response is not None and responses is not None:
        raise typer.BadParameter("give either --response or --responses")
    if responses is not None and not responses.is_file():
        raise typer.BadParameter(f"{responses} is no file", param_hint="--responses")
    loaded = load_recipe(recipe_path(target), overrides or [])
    if not loaded.recipe.reward.options():
        raise loaded.locate(RecipeError.at("reward", "the recipe has no reward to try"))
    try:
        given = read_responses(responses) if responses else [response] if response is not None else []
        trials = list(try_rewards(loaded.recipe, rows, given))
    except RecipeError as error:
        raise loaded.locate(error) from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--responses") from error
    console.print(_table(trials, list(loaded.recipe.reward.options())))
    failed = [(name, score) for trial in trials for name, score in trial.scores.items() if score.error]
    traces = {score.trace or score.error: name for name, score in failed}
    for trace, name in islice(traces.items(), MAX_TRACES):
        console.print(Text(f"\n{name}\n", "bold red").append(trace.rstrip(), "not bold default"), soft_wrap=True)
    if len(traces) > MAX_TRACES:
        console.print(Text(f"\nand {len(traces) - MAX_TRACES} more errors"))
    if any(not trial.scores for trial in trials):
        console.print(Text("\nno reward applies to some rows: look at the `sources` of rewards", "red"))
    if any(trial.reward is None for trial in trials):
        raise typer.Exit(1)


def _table(trials: list[RewardTrial], names: list[str]) -> Table:
    table = Table(show_lines=len(names) > 1)
    for title in ("row", "prompt", "expected", "response"):
        table.add_column(title)
    for name in names:
        # The name of its function distinguishes a custom reward well enough, and is short.
        table.add_column(Text(name.rpartition(":")[2]), justify="right")
    table.add_column("reward", justify="right")
    for trial in trials:
        sample = trial.sample
        made = {"expected": Text("the expected answer", "dim"), "empty": Text("empty", "dim")}
        table.add_row(
            str(trial.row),
            _cut(sample.prompt),
            _cut(sample.answer),
            made.get(trial.kind) or _cut(sample.response),
            *(_cell(trial.scores.get(name)) for name in names),
            Text("failed", "red") if trial.reward is None else Text(f"{trial.reward:.4g}", "bold"),
        )
    return table


def _cell(score: Score | None) -> Text:
    if score is None:
        return Text("–", "dim")
    text = Text("failed" if score.value is None else f"{score.value:.4g}", "red" if score.error else "")
    if score.answer is not None:
        text.append("\nfound ", "dim").append_text(_cut(score.answer))
    if score.said:
        text.append("\nsays ", "dim").append_text(_end(score.said))
    milliseconds = 1000 * score.seconds
    return text.append("\n<1 ms" if milliseconds < 1 else f"\n{milliseconds:,.0f} ms", "dim")


def _end(said: str) -> Text:
    text = " ".join(said.split())
    return Text(text if len(text) <= MAX_CELL_CHARACTERS else f"…{text[-MAX_CELL_CHARACTERS:]}")


def _cut(value: object) -> Text:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    text = " ".join(text.split())
    return Text(text if len(text) <= MAX_CELL_CHARACTERS else f"{text[:MAX_CELL_CHARACTERS]}…")
