"""Numbers of a run for trackers that know gauges and counters: the newest values, and totals. Imports no tracker."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from leaderless.observability.clock import PREFIX, by_pool
from leaderless.observability.known_metrics import Metric, known_metric
from leaderless.observability.loggers.follower import EVALUATION
from leaderless.observability.loggers.protocol import Numbers

STEPS, TOKENS, SECONDS = "steps", "tokens", "seconds"
"""Names of the totals that are kept here."""
_MEANINGS = {
    "step": "step that was logged last",
    "time_s": "seconds since the run began, with earlier starts",
    STEPS: "steps that were logged since this logger started, repeated ones included",
    TOKENS: "tokens of all samples, prompts included, since this logger started",
    SECONDS: "seconds that ranks have spent in one state since this logger started, the mean over the ranks of a pool",
}


class RunningValue(NamedTuple):
    """A value of a run.

    Attributes:
        name: Name of the metric, or of the total.
        labels: Words that tell it from other values of the name: its log, or the ranks and the state of seconds.
        value: Value; NaN if it is not finite.
        is_total: Whether it only grows, except that it may begin again.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float
    is_total: bool

    @property
    def meaning(self) -> str:
        """Meaning, as a sentence; a metric of a custom stage has its name alone."""
        meaning = _MEANINGS.get(self.name) or _meaning(self.name)
        return f"{meaning[0].upper()}{meaning[1:]}." if meaning else f"Metric {self.name} of a custom stage."


Key = tuple[str, tuple[tuple[str, str], ...], bool]
"""Name, labels, and whether it is a total: a custom stage may also have a metric `steps`."""


@dataclass
class RunningValues:
    """The newest values of a run, and totals over the steps since they began to be kept."""

    _values: dict[Key, RunningValue] = field(default_factory=dict)

    def copy(self) -> RunningValues:
        """The same values, which then change on their own."""
        return RunningValues(dict(self._values))

    def __iter__(self) -> Iterator[RunningValue]:
        """All values, in the order in which they came."""
        return iter(self._values.values())

    def add(self, numbers: Numbers) -> list[RunningValue]:
        """Take the numbers of a step; returns the values that they change."""
        log, step, values = numbers
        labels = (("log", log),) if log else ()
        pools = by_pool(values)
        changed = [RunningValue("step", labels, step, is_total=False)]
        changed += [
            RunningValue(name, labels, value, is_total=_is_total(name))
            for name, value in values.items()
            if not name.startswith(PREFIX)
        ]
        for pool, states in pools.items():
            for state, name in states.items():
                where = (*labels, ("ranks", pool), ("state", state))
                changed += self._more(SECONDS, where, values[name])
        if log != EVALUATION:
            changed += self._more(STEPS, labels, 1)
        tokens = values.get("throughput/tokens_per_s", math.nan) * values.get("time/step", math.nan)
        changed += self._more(TOKENS, labels, tokens)
        self._values |= {(one.name, one.labels, one.is_total): one for one in changed}
        return changed

    def forget_totals(self) -> None:
        """Begin the totals that are kept here again."""
        kept = {STEPS, TOKENS, SECONDS}
        self._values = {key: one for key, one in self._values.items() if not (one.is_total and one.name in kept)}

    def _more(self, name: str, labels: tuple[tuple[str, str], ...], value: float) -> list[RunningValue]:
        if not math.isfinite(value):
            return []
        before = self._values.get((name, labels, True))
        # Tokens and steps are whole numbers; a fraction of seconds stays.
        more = value if name == SECONDS else round(value)
        return [RunningValue(name, labels, (before.value if before else 0) + more, is_total=True)]


@cache
def _metric(name: str) -> Metric | None:
    return known_metric(name)


def _meaning(name: str) -> str:
    metric = _metric(name)
    return metric.meaning.replace("`", "") if metric else ""


def _is_total(name: str) -> bool:
    metric = _metric(name)
    return metric is not None and metric.is_total


def words_of(name: str) -> list[str]:
    """The parts of the name of a metric, in letters of ASCII, digits and `_`.

    `@` becomes `_at_`, `->` becomes `_to_`, and any other sign `_`, but for those at the end of a part.
    """
    parts = (part.replace("@", "_at_").replace("->", "_to_") for part in name.split("/"))
    words = (re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") for part in parts)
    return [word for word in words if word]


def run_labels(recipe: Mapping[str, object], tags: tuple[str, ...]) -> dict[str, str]:
    """Facts about a run, for people who look for it."""
    return {"workflow": str(recipe.get("workflow", "")), "tags": ",".join(tags)}
