"""All algorithms, each with the formula and the source that its docstring gives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leaderless.algorithms import correction, loss_terms, packed, policy_loss, returns
from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.algorithm import Algorithm
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.preferences import PREFERENCE_LOSSES

Function = Callable[..., object]

FUNCTIONS: Mapping[str, tuple[Function, ...]] = {
    "reward": (returns.token_level_rewards, returns.overlong_penalty),
    "whitening": (returns.whiten,),
    "value loss": (loss_terms.clipped_value_loss,),
    "reward model": (loss_terms.bradley_terry,),
    "covariance": (policy_loss.covariances,),
    "KL": (loss_terms.kl_penalty, loss_terms.adapted_coefficient),
    "aggregation": (packed.token_weights,),
    "correction": (
        correction.importance_ratios,
        correction.truncated_weights,
        correction.masked_weights,
        correction.is_within,
        correction.interpolated_log_probs,
    ),
}
"""Functions that several algorithms share, by kind; one that offers several variants lists them in its docstring."""
CLASSES: Mapping[str, Mapping[str, type[Algorithm]]] = {
    "advantage": ADVANTAGES,
    "policy loss": POLICY_LOSSES,
    "preference loss": PREFERENCE_LOSSES,
}
"""Algorithms that a setting's `type` selects, by kind."""


class Entry(NamedTuple):
    """One algorithm.

    Attributes:
        kind: Kind of algorithm, such as `advantage`.
        name: Name of the type, of the function, or of the variant that one of its arguments selects.
        formula: Formula in one line.
        source: Paper and equation.
    """

    kind: str
    name: str
    formula: str
    source: str


def entries() -> Iterator[Entry]:
    """All algorithms, kind by kind.

    Raises:
        ValueError: A docstring lacks its formula or its source.
    """
    for kind, classes in CLASSES.items():
        for name, found in classes.items():
            paragraphs = _paragraphs_of(found)
            yield Entry(kind, name, _paragraph(name, paragraphs, "Formula"), _paragraph(name, paragraphs, "Source"))
    for kind, functions in FUNCTIONS.items():
        for function in functions:
            yield from _entries_of(kind, function)


def show(console: Console) -> None:
    """Print all algorithms: a table to a terminal, tab-separated lines to a file or a pipe."""
    if not console.is_terminal:
        for entry in entries():
            # Straight to the file, because a console turns tabs into spaces.
            console.file.write("\t".join(entry) + "\n")
        return
    table = Table("kind", "name", "formula", "source", show_lines=True)
    for entry in entries():
        table.add_row(entry.kind, Text(entry.name, "bold"), Text(entry.formula), Text(entry.source, "dim"))
    console.print(table)


def _entries_of(kind: str, function: Function) -> Iterator[Entry]:
    """A function, or each of its variants: lines as "- `name`: formula; source"."""
    name, paragraphs = function.__name__, _paragraphs_of(function)
    variants = [paragraph for paragraph in paragraphs if paragraph.startswith("- `")]
    if not variants:
        yield Entry(kind, name, _paragraph(name, paragraphs, "Formula"), _paragraph(name, paragraphs, "Source"))
        return
    for line in re.split(r"^- ", variants[0], flags=re.MULTILINE)[1:]:
        variant = re.fullmatch(r"`(\w+)`: ([^;]+); (.+)", " ".join(line.split()))
        if variant is None:
            raise ValueError(f"the docstring of {name} has '- {line.strip()}': must be '- `name`: formula; source'")
        yield Entry(kind, f"{name}: {variant[1]}", variant[2], variant[3].rstrip("."))


def _paragraphs_of(documented: object) -> list[str]:
    return (inspect.getdoc(documented) or "").split("\n\n")


def _paragraph(name: str, paragraphs: list[str], label: str) -> str:
    for paragraph in paragraphs:
        if paragraph.startswith(f"{label}: "):
            return " ".join(paragraph.removeprefix(f"{label}: ").split()).rstrip(".")
    raise ValueError(f"the docstring of {name} has no paragraph '{label}: ...'")
