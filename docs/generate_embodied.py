"""Results of benchmarks of learning with bodies, for the pages that show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import mean, median

from generate_markup import between, table_of

SRPO = Path(__file__).parent / "performance/srpo_steps.json"
RLPD = Path(__file__).parent / "performance/rlpd.json"
TARGET = 0.9
"""Share of successes that a run is to reach."""
MARKS = (1000, 2000, 3000)
"""Steps of the arm by which a run is judged."""
HEAD = (
    "The table of blocks with the settings of the quickstart, from policies that had imitated some demonstrations; the "
    "only reward is success. A step is 384 episodes and two updates; 256 held-out starts are played every ten steps, "
    "so steps are exact to ten (`benchmarks/srpo_steps.py`). A run ended at 90 %, or after its last step."
)
WAYS = {
    "start": "After 40 demonstrations. Each start has a table of its own, and SRPO compares its episodes:",
    "task": (
        "After 8 demonstrations. There are six tables with many starts, and SRPO compares all episodes on a table "
        "(`task: task`):"
    ),
}
Curve = Sequence[tuple[int, float]]
Curves = Mapping[str, Mapping[str, Curve]]
"""Steps and success, by algorithm and seed."""


def with_srpo(page: str) -> str:
    """The page of SRPO with what `benchmarks/srpo_steps.py` has measured."""
    ways = json.loads(SRPO.read_text(encoding="utf-8"))
    return between(
        page, "srpo steps", "\n\n".join([HEAD, *(f"{WAYS[way]}\n\n{srpo_steps(ways[way])}" for way in ways)])
    )


def srpo_steps(curves: Curves) -> str:
    """A table of steps and success, with what it says."""
    seeds = [seed for seed in curves["grpo"] if seed in curves["srpo"]]
    pairs = [(curves["grpo"][seed], curves["srpo"][seed]) for seed in seeds]
    rows = []
    for seed, (grpo, srpo) in zip(seeds, pairs, strict=True):
        common = min(grpo[-1][0], srpo[-1][0])
        rows.append(
            (
                seed,
                f"{grpo[0][1]:.1%}",
                *(_reached(one) for one in (grpo, srpo)),
                str(common),
                *(f"{dict(one)[common]:.1%}" for one in (grpo, srpo)),
            )
        )
    titles = ("seed", "before", "GRPO, steps to 90 %", "SRPO, steps to 90 %", "both at step", "GRPO", "SRPO")
    return f"{table_of(titles, rows)}\n\n{_srpo_sentences(pairs)}"


def _srpo_sentences(pairs: Sequence[tuple[Curve, Curve]]) -> str:
    grpo, srpo = ([first_at(one) for one in some] for some in zip(*pairs, strict=True))
    both = [(a, b) for a, b in zip(grpo, srpo, strict=True) if a is not None and b is not None]
    wins = sum(b is not None and (a is None or b < a) for a, b in zip(grpo, srpo, strict=True))
    ties = sum(a == b for a, b in zip(grpo, srpo, strict=True))
    losses = len(pairs) - wins - ties
    said = f"Of {len(pairs)} seeds, SRPO was first with {wins} and GRPO with {losses}"
    said += f"; with {ties}, both were there at the same evaluation, or neither ever. " if ties else ". "
    if both:
        ratios = sorted(b / a for a, b in both)
        spread = f"median of {len(both)}; {ratios[0]:.2f} to {ratios[-1]:.2f}" if len(both) > 1 else "one seed"
        said += f"Where both reached it, SRPO took {median(ratios):.2f} times the steps of GRPO ({spread}). "
    gains = []
    for one, other in pairs:
        common = min(one[-1][0], other[-1][0])
        gains.append(100 * (dict(other)[common] - dict(one)[common]))
    return (
        f"{said}At the last step that both have, the success of SRPO minus that of GRPO was {median(gains):+.1f} "
        f"points (median; from {min(gains):+.1f} to {max(gains):+.1f}). {verdict(wins, losses)}"
    )


def verdict(num_srpo: int, num_grpo: int) -> str:
    """What a two-sided sign test says of the seeds with which one of the two was there first."""
    num, most = num_srpo + num_grpo, max(num_srpo, num_grpo)
    chance = min(1.0, 2 * sum(comb(num, k) for k in range(most, num + 1)) / 2**num)
    better = "SRPO needs" if num_srpo > num_grpo else "GRPO needs"
    shown = f"{better} fewer steps" if chance < 0.05 else "these seeds do not show that either needs fewer steps"
    return f"By a sign test (two-sided, p = {chance:.2f}), {shown}."


def with_rlpd(page: str) -> str:
    """The page of real arms with what `benchmarks/rlpd.py` has measured."""
    return between(page, "rlpd", rlpd(json.loads(RLPD.read_text(encoding="utf-8"))))


def rlpd(curves: Curves) -> str:
    """A table of success by steps of the arm, with what it says."""
    names = {"rlpd": "RLPD", "sac": "SAC, without demonstrations"}
    rows = []
    for key, name in names.items():
        for seed, curve in curves.get(key, {}).items():
            shares = (f"{success_at(curve, steps):.0%}" for steps in MARKS)
            rows.append((name, seed, *shares, _reached(curve)))
        runs = list(curves.get(key, {}).values())
        if len(runs) > 1:
            rows.append((name, "mean", *(f"{mean(success_at(one, s) for one in runs):.0%}" for s in MARKS), ""))
    titles = ("algorithm", "seed", *(f"{steps:,} steps" for steps in MARKS), "steps to 90 %")
    return table_of(titles, rows)


def success_at(curve: Curve, steps: int) -> float:
    """Success in the evaluation nearest to a number of steps."""
    return min(curve, key=lambda point: abs(point[0] - steps))[1]


def first_at(curve: Curve) -> int | None:
    """Steps of the first evaluation that reaches the target; None if none does."""
    return next((steps for steps, success in curve if success >= TARGET), None)


def _reached(curve: Curve) -> str:
    steps = first_at(curve)
    return f"more than {curve[-1][0]:,}" if steps is None else f"{steps:,}"
