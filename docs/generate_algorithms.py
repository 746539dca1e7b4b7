"""The pages about algorithms: measurements, formulas, and possible combinations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, get_args

from generate_markup import between, cell, table_of

from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.catalogue import entries
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.settings import AlgorithmConfig, KlConfig, refusals


def results_page() -> str:
    """The newest results of `benchmarks/algorithms.py`."""
    from benchmarks.algorithms import PICTURE, describe, load, table

    parts = [
        "# Measured on the quickstart",
        (
            "Every built-in workflow in which a policy answers starts from the same tiny model, which has learned to "
            "add from careless demonstrations. The only signal is whether its answers are right, except in "
            "`distillation`, where it is a teacher: the final model of `grpo` with the first seed. Accuracy is that of "
            "greedy answers to 512 additions that no run was trained on. The settings are those of "
            "`recipes/quickstart/grpo.yaml`, but `ppo` and `dapo` have their own recipes there, and `distillation` has "
            "no penalty. Each run has one worker on one CPU core; the seed determines the order of the prompts and the "
            "samples."
        ),
    ]
    curves = load()
    if curves:
        parts += [
            (
                f"{describe()} Seconds are the time of all steps of the fastest seed, without evaluation. Other load "
                "on the machine adds to them, possibly more than the run itself."
            ),
            table(curves, link="[{0}]({0}.md)"),
            f"![Held-out accuracy by step, a chart for each workflow](../images/{PICTURE.name})",
            (
                "The line is the mean over seeds, the band goes from the worst to the best seed, gray lines are the "
                "other workflows. The task is small and its reward exact, so this shows that each workflow learns, "
                "not which is best for a large model."
            ),
        ]
    else:
        parts += ["There are no results yet: the script below has not been run for this version."]
    return "\n\n".join([*parts, "To measure it again:", "```shell\npython benchmarks/algorithms.py\n```"])


def formulas_page() -> str:
    """All functions of `leaderless.algorithms`, as their docstrings describe them."""
    rows = [(entry.kind, f"`{entry.name}`", f"`{cell(entry.formula)}`", cell(entry.source)) for entry in entries()]
    return "\n\n".join(
        [
            "# Formulas and sources",
            (
                "Every algorithm and every function that they share, as described by its docstring; `python -m "
                "leaderless.algorithms` prints the same. `A` is the advantage of a token, `ratio` the ratio of its "
                "probability under the current policy to its probability before the step's updates, and `sg` stops the "
                "gradient. [Algorithms](../algorithms/index.md) describes how to combine them."
            ),
            table_of(("kind", "name", "formula", "source and deviations"), rows),
        ]
    )


PENALTIES: dict[str, dict[str, object]] = {
    "no penalty": {"coefficient": 0.0},
    "penalty in the loss": {"coefficient": 0.1},
    "penalty in the loss, `unbiased_gradient`": {"coefficient": 0.1, "unbiased_gradient": True},
    "penalty in the reward": {"coefficient": 0.1, "place": "reward"},
    "penalty in the reward, `unbiased_gradient`": {"coefficient": 0.1, "place": "reward", "unbiased_gradient": True},
}


class Trial(NamedTuple):
    """A combination, and why it is refused."""

    advantage: str
    loss: str
    aggregation: str
    penalty: str
    reasons: list[str]


def with_combinations(page: str) -> str:
    """A page with the table of combinations between its two marks."""
    return between(page, "combinations", combinations())


def combinations() -> str:
    """All combinations of advantage, loss, aggregation and KL penalty, and why some are refused."""
    trials = list(_trials())
    advantages, losses = (list(dict.fromkeys(trial[i] for trial in trials)) for i in range(2))
    cells = {(loss, name): [t for t in trials if t[:2] == (name, loss)] for loss in losses for name in advantages}
    rules = list(dict.fromkeys(reason for trial in trials for reason in trial.reasons))
    # A rule that holds whatever the advantage and the loss says nothing in their table.
    everywhere = [rule for rule in rules if all(any(rule in t.reasons for t in tried) for tried in cells.values())]
    numbered = [rule for rule in rules if rule not in everywhere]
    rows = []
    for loss in losses:
        row = [f"`{loss}`"]
        for name in advantages:
            tried = cells[loss, name]
            # The aggregations and penalties of a rule that refuses all of them need no other rule.
            total = [rule for rule in numbered if all(rule in trial.reasons for trial in tried)]
            found = total or [rule for rule in numbered if any(rule in trial.reasons for trial in tried)]
            marks = " ".join(f"({numbered.index(rule) + 1})" for rule in found)
            row.append(f"refused {marks}" if total else f"yes {marks}".rstrip())
        rows.append(tuple(row))
    table = table_of(("loss, advantage", *(f"`{name}`" for name in advantages)), rows)
    notes = [f"{i}. {_rule(rule, trials)}" for i, rule in enumerate(numbered, 1)]
    wide = [f"With any advantage and loss: {_rule(rule, trials)}" for rule in everywhere]
    counted = f"{sum(not trial.reasons for trial in trials):,} of {len(trials):,} combinations are accepted."
    return "\n\n".join([table, "\n".join(notes), *wide, counted])


def _trials() -> Iterator[Trial]:
    aggregations = get_args(AlgorithmConfig.model_fields["aggregation"].annotation)
    for advantage, loss, aggregation, (penalty, kl), estimator in product(
        ADVANTAGES.values(),
        POLICY_LOSSES.values(),
        aggregations,
        PENALTIES.items(),
        get_args(KlConfig.model_fields["estimator"].annotation),
    ):
        algorithm = AlgorithmConfig.model_construct(
            advantage=advantage.model_construct(),
            policy_loss=loss.model_construct(),
            aggregation=aggregation,
            kl=KlConfig.model_validate({**kl, "estimator": estimator}),
        )
        varied = re.compile(rf"(aggregation={aggregation}|estimator={estimator}(?= with kl.place=reward))\b")
        reasons = [varied.sub(lambda found: f"{found[0].partition('=')[0]}=…", one) for one in refusals(algorithm)]
        names = [section.model_fields["type"].default for section in (advantage, loss)]
        yield Trial(names[0], names[1], aggregation, penalty, reasons)


def _rule(rule: str, trials: Sequence[Trial]) -> str:
    """A refusal, with the aggregations and penalties it applies to, unless it applies to all."""
    about = [trial for trial in trials if rule in trial.reasons]
    scopes = []
    for field, mark in (("aggregation", "`"), ("penalty", "")):
        met, all_values = (dict.fromkeys(getattr(trial, field) for trial in some) for some in (about, trials))
        if len(met) < len(all_values):
            scopes.append(", ".join(f"{mark}{value}{mark}" for value in met))
    text = re.sub(r"[\w.]+=[\w.…]+|(?:algorithm|kl|policy_loss)\.[\w.]+", lambda match: f"`{match[0]}`", rule)
    return f"{text} ({'; '.join(scopes)})." if scopes else f"{text}."
