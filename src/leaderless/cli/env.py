"""`leaderless env`: environments, and the episodes that were played in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from leaderless.cli.env_try import try_
from leaderless.config import RecipeError
from leaderless.observability.console import console, print_line
from leaderless.observability.episode_files import Kind

if TYPE_CHECKING:
    from leaderless.run.episodes import Comparison, RunEpisodes

MAX_SHOWN = 10
"""Number of differences and of changes that are listed."""
MAX_CELL_CHARACTERS = 60
"""Length at which a response is cut in the table."""

env = typer.Typer(help="Try environments, and play the episodes of a run again.", no_args_is_help=True)

env.command("try")(try_)


@env.command("replay")
def replay_episodes(
    target: Annotated[
        Path, typer.Argument(metavar="RUN|FILE", help="The folder of a run, or a file of its folder `episodes`.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as section.key=value, on top of the run's.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only the episodes of this step.")] = None,
    episode: Annotated[int | None, typer.Option(help="Only the episode of this number.")] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Episodes of evaluations, not of training.")] = False,
    from_journal: Annotated[
        bool,
        typer.Option(
            "--from-journal", help="Take the environment's answers from the journal: compares only the tokens."
        ),
    ] = False,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="Grade again, in place of playing: a recipe whose `reward` section is used, or a setting as "
            "math.weight=0.5. May be given several times."
        ),
    ] = None,
) -> None:
    """Play the episodes of a run again, without model and tools, and compare each answer of the environment.

    Ends with exit code 1 if anything differs, and says what differs first.
    """
    from leaderless.run.episodes import RunEpisodes  # imports torch

    if reward and evaluation:
        raise typer.BadParameter("rewards are computed again for episodes of training only", param_hint="--reward")
    kind: Kind = "evaluation" if evaluation else "step"
    episodes = RunEpisodes.of(target, overrides or [])
    steps = [one for one in episodes.steps(kind) if step in {None, one}]
    if not steps:
        known = ", ".join(map(str, episodes.steps(kind)))
        remedy = f"there are those of {known}" if known else "none were played yet, or `run.kept_episodes` is 0"
        raise RecipeError.at("", f"{target} has no episodes of this {kind}: {remedy}")
    try:
        if reward:
            _print_graded_again(episodes.regrade(steps, reward), episode)
        elif not _replay(episodes, kind, steps, episode, from_journal=from_journal):
            raise typer.Exit(1)
    except ValueError as error:
        raise RecipeError.at("", str(error)) from error


def _replay(episodes: RunEpisodes, kind: Kind, steps: Sequence[int], number: int | None, *, from_journal: bool) -> bool:
    """Play episodes again, and print what differs; returns whether nothing does."""
    num_played = num_different = 0
    for step in steps:
        lines = [line for line in episodes.played(kind, step) if number in {None, line["id"]}]
        for line, difference in episodes.replay(kind, lines, from_journal=from_journal):
            num_played += 1
            if difference is None:
                continue
            num_different += 1
            if num_different <= MAX_SHOWN:
                print_line(f"{kind} {step}, episode {line['id']}, {difference.place}:")
                print_line(f"  expected {difference.expected}\n  found    {difference.found}")
    if not num_played:
        raise RecipeError.at("", f"there is no episode {number} in the {kind}s {', '.join(map(str, steps))}")
    if num_different:
        print_line(f"{num_different:,} of {num_played:,} episodes differ")
        return False
    print_line(f"{num_played:,} episodes played again; none differs")
    return True


def _print_graded_again(steps: Iterable[tuple[int, list[Comparison]]], number: int | None) -> None:
    table = Table()
    for title in ("step", "episodes", "failed before", "failed now", "mean before", "mean now"):
        table.add_column(title, justify="right")
    changes: list[tuple[float, int, Comparison]] = []
    for step, graded in steps:
        chosen = [one for one in graded if one.part.is_sampled and number in {None, one.part.number}]
        before = [one.before for one in chosen if one.old is not None]
        now = [one.now for one in chosen]
        whole_before, whole_now = ([value for value in values if value is not None] for values in (before, now))
        table.add_row(
            str(step),
            f"{len(chosen):,}",
            f"{len(before) - len(whole_before):,}" if before else "–",
            f"{len(now) - len(whole_now):,}",
            _mean(whole_before),
            _mean(whole_now),
        )
        changed = ((abs((one.now or 0.0) - (one.before or 0.0)), step, one) for one in chosen if one.old is not None)
        changes = nlargest(MAX_SHOWN, [*changes, *(one for one in changed if one[0])], key=lambda one: one[0])
    console.print(table)
    if changes:
        print_line("\nthe largest changes:")
        console.print(_table_of_changes(changes))


def _table_of_changes(changes: Sequence[tuple[float, int, Comparison]]) -> Table:
    table = Table()
    for title in ("step", "episode", "before", "now", "said last"):
        table.add_column(title, justify="left" if title == "said last" else "right")
    for _, step, one in changes:
        said = " ".join(one.part.asked.response.split()) if one.part.asked is not None else ""
        said = said if len(said) <= MAX_CELL_CHARACTERS else f"{said[:MAX_CELL_CHARACTERS]}…"
        table.add_row(str(step), str(one.part.number), _value(one.before), _value(one.now), Text(said))
    return table


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f}" if values else "–"


def _value(value: float | None) -> str:
    return "failed" if value is None else f"{value:.4g}"
