"""The common base of advantages and losses: a section of the recipe that `type` selects, with its mathematics."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from leaderless.base.section import Section

if TYPE_CHECKING:
    from leaderless.algorithms.settings import AlgorithmConfig


class CheckedBatch(Protocol):
    """The section `batch` of a recipe, as far as algorithms check it."""

    @property
    def responses_per_prompt(self) -> int:
        """Number of responses in a group."""


class CheckedBody(Protocol):
    """The section `body` of a recipe, as far as algorithms check it."""

    @property
    def log_prob(self) -> str:
        """Whether each action has a log-probability, or a whole decision: `action` or `chunk`."""


class CheckedRecipe(Protocol):
    """A recipe, as far as algorithms check it. The recipe is built of algorithms, so that they cannot import it."""

    @property
    def batch(self) -> CheckedBatch:
        """Sizes of a step."""

    @property
    def body(self) -> CheckedBody | None:
        """The body that the policy moves, if there is one."""

    @property
    def models(self) -> Container[str]:
        """Roles that have a model."""


class Algorithm(Section):
    """A part of an algorithm: its settings, what it needs, what it cannot be combined with, and its mathematics.

    A built-in one is a file of its folder, which is found without being listed; a custom one is a class that a recipe
    names as `package.module:Class`. The fields are the settings. The docstring has a summary, a paragraph `Formula:`
    and a paragraph `Source:` with every deviation.

    Attributes:
        reads: Columns that it reads besides those that every algorithm gets.
        metrics: Metrics that it reports, with their meanings.
    """

    type: str
    reads: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, str]] = {}

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:  # noqa: ARG002
        """Reasons why it cannot be combined with other settings of the algorithm; none by default.

        A reason begins with the setting, as in "algorithm.aggregation=token_mean does not go with ...: use ...".
        """
        yield from ()

    def check(self, recipe: CheckedRecipe) -> None:
        """Raise `RecipeError` for settings of the recipe with which it cannot work; does nothing by default."""


def check_declared(algorithm: Algorithm, attribute: str, names: Iterable[str], declared: Iterable[str]) -> None:
    """Raise ValueError if a class returns other names than those that its attribute declares."""
    if set(names) != set(declared):
        raise ValueError(
            f"{algorithm.type} returned the {attribute} {sorted(names)}, but declares {sorted(declared)}: name in "
            f"`{attribute}` exactly what it returns"
        )
