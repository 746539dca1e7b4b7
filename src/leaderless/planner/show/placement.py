"""How a choice is shown: what was chosen, what it should take, and why the next best lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from leaderless.planner.placement.search import Option, PlacementChoice
    from leaderless.planner.placement.step_seconds import Predicted

NOTABLE = 1.005
"""From this number of times the seconds of the choice on, an option is shown as slower: 1 % and more."""


def print_choice(choice: PlacementChoice, console: Console) -> None:
    """Print the chosen layout and the next best, with predicted seconds."""
    title = f"placement: the best of {choice.num_candidates} layouts, by {_basis(choice)}"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("", "layout", "seconds of a step", "why"):
        table.add_column(name, justify="right" if name.startswith("seconds") else "left")
    for place, option in enumerate((choice.best, *choice.others)):
        predicted = option.predicted
        seconds = f"{predicted.seconds:.3g} ±{predicted.error:.0%}"
        table.add_row("chosen" if not place else str(place + 1), str(option.candidate), seconds, reason(option, choice))
    console.print(table)
    if choice.without is not None:
        console.print(without_helpers(choice), highlight=False, markup=False)
    for candidate, why in choice.refused:
        console.print(f"not possible: {candidate}: {why}", highlight=False, markup=False)


def choice_line(choice: PlacementChoice) -> str:
    """The chosen layout as one line, with its seconds, and where they come from."""
    return f"layout: {choice.best.candidate}; {choice.best.predicted.seconds:.3g} s a step by {_basis(choice)}"


def _basis(choice: PlacementChoice) -> str:
    cluster = choice.profile.cluster
    if not cluster:
        return "measured seconds"
    return f"the cost model of '{cluster}', which is no measurement: `leaderless profile` measures"


def without_helpers(choice: PlacementChoice) -> str:
    """Layout and seconds of the workers with their own device alone, and the consequences."""
    without = choice.without
    assert without is not None, "there are helpers"
    num_workers, seconds = without.plan.world_size, without.predicted.seconds
    text = f"{num_workers} workers without helpers: {without.candidate}: {seconds:.3g} s"
    ratio = seconds / choice.best.predicted.seconds
    if ratio < NOTABLE:
        return f"{text}, about as fast or faster: start {num_workers} workers, and leave placement.helpers out"
    return f"{text}, {ratio - 1:.0%} slower"


def print_predicted(predicted: Predicted, console: Console, head: str = "") -> None:
    """Print the seconds of a step, and of its nodes, after a head."""
    title = f"{head}a step: {predicted.seconds:.3g} s ±{predicted.error:.0%}"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("node")
    table.add_column("seconds of the slowest rank", justify="right")
    for name, seconds in predicted.nodes.items():
        table.add_row(name, f"{seconds:.3g}")
    console.print(table)


def reason(option: Option, choice: PlacementChoice) -> str:
    """Why an option was chosen, or was not, in terms of the node that makes the difference."""
    best, mine = choice.best.predicted, option.predicted
    if option is choice.best:
        name = max(mine.nodes, key=mine.nodes.__getitem__)
        return f"'{name}' takes the most, {mine.nodes[name]:.3g} s"
    if mine.seconds < NOTABLE * best.seconds:
        return "about as fast, but further ahead, continuous, or in more pools or windows"
    slower = {name: seconds - best.nodes.get(name, 0.0) for name, seconds in mine.nodes.items()}
    name = max(slower, key=slower.__getitem__)
    change = f"{mine.seconds / best.seconds - 1:.0%} slower"
    if slower[name] <= 0 and option.candidate.cache:
        return f"{change}: responses that take over {option.candidate.lag + 1} steps hold training up"
    if slower[name] <= 0:
        return f"{change}: pools wait for each other"
    return f"{change}: '{name}' takes {mine.nodes[name]:.3g} s, not {best.nodes.get(name, 0.0):.3g}"


def choice_to_json(choice: PlacementChoice) -> dict[str, object]:
    """The choice as JSON-able values."""
    options = [
        {
            "layout": {name: config.ranks for name, config in option.recipe.layout.items()},
            "capacity": option.candidate.lag,
            "continuous": bool(option.candidate.cache),
            "helpers": dict(option.candidate.helpers),
            "portions": option.candidate.portions,
            "windows": option.recipe.batch.windows_per_step,
            "seconds": option.predicted.seconds,
            "error": option.predicted.error,
            "nodes": option.predicted.nodes,
            "reason": reason(option, choice),
        }
        for option in (choice.best, *choice.others)
    ]
    refused = [{"layout": str(candidate), "reason": why} for candidate, why in choice.refused]
    found: dict[str, object] = {"num_candidates": choice.num_candidates, "options": options, "refused": refused}
    found["cluster"] = choice.profile.cluster or None
    if choice.without is not None:
        found["without_helpers"] = choice.without.predicted.seconds
    return found
