"""The pictures and the table of the gallery, and the figures about controllers, from files of measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from generate_markup import between, table_of

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 190, 16, 40
COLORS = ("#4053d3", "#ddb310", "#b51d14", "#00beff", "#fb49b0", "#00b25d", "#9a9a9a")
"""Colors that people with any vision can tell apart."""
Curve = Sequence[tuple[float, float]]
SHOWN = (0, 50, 100, 200, 300)
"""Steps of counting that its table shows."""
COUNTING = {"GRPO": "performance/counting.json", "PPO": "performance/counting_ppo.json"}
"""Files of what was learned of counting."""


class Chart(NamedTuple):
    """A chart of curves.

    Attributes:
        x_label: Label of the horizontal axis.
        curves: Curves of each way, one for each seed.
    """

    x_label: str
    curves: Mapping[str, Sequence[Curve]]


def gallery_pictures() -> dict[str, str]:
    """Each picture of the gallery as SVG, by its name."""
    charts = {
        "gallery-additions": _additions(),
        "gallery-signal": _signal(),
        "gallery-search": _search(),
        "gallery-srpo": _srpo(),
        "gallery-srpo-steps": _to_target(
            _read("performance/srpo_steps.json")["start"], "step", {"grpo": "GRPO", "srpo": "SRPO"}
        ),
        "gallery-rlpd": _to_target(_read("performance/rlpd.json"), "steps of the arm", {"rlpd": "RLPD", "sac": "SAC"}),
        "gallery-staleness": _staleness(),
        "gallery-lora": _lora(),
        "gallery-counting": _counting(),
    }
    return {name: draw_chart(chart) for name, chart in charts.items()}


def draw_chart(chart: Chart) -> str:
    """A chart of shares by step as SVG: the mean of each way, with a band from its lowest to its highest curve.

    Curves that were measured at different steps have no mean: each is a line of its own.
    """
    last = max(x for curves in chart.curves.values() for curve in curves for x, _ in curve)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            f'font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        )
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#555">{share:.0%}</text>')
    parts += [
        f'<text x="{_x(x, last)}" y="{HEIGHT - 20}" text-anchor="middle" fill="#555">{x:g}</text>'
        for x in range(0, math.ceil(last) + 1, _stride(last))
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle" fill="#555">{chart.x_label}</text>')
    for number, (name, curves) in enumerate(chart.curves.items()):
        color = COLORS[number % len(COLORS)]
        dash = ' stroke-dasharray="6 3"' if number >= len(COLORS) else ""
        xs = [x for x, _ in curves[0]]
        lines = curves
        if all([x for x, _ in curve] == xs for curve in curves):
            columns = list(zip(*([y for _, y in curve] for curve in curves), strict=True))
            lines = [list(zip(xs, map(fmean, columns), strict=True))]
            if len(curves) > 1:
                upper, lower = (list(zip(xs, map(bound, columns), strict=True)) for bound in (max, min))
                edge = _line([*upper, *reversed(lower)], last)
                parts.append(f'<path d="{edge}Z" fill="{color}" fill-opacity="0.13"/>')
        parts += [
            f'<path d="{_line(line, last)}" fill="none" stroke="{color}" stroke-width="2"{dash}/>' for line in lines
        ]
        y = TOP + 8 + 19 * number
        x = WIDTH - RIGHT + 14
        parts.append(f'<path d="M{x} {y}h20" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x + 26}" y="{y + 4}" fill="#222">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _stride(last: float) -> int:
    """The least round number of steps between labels of which there are at most seven."""
    return next(n for power in range(6) for n in (10**power, 2 * 10**power, 5 * 10**power) if last / n <= 6)


def _line(points: Sequence[tuple[float, float]], last: float) -> str:
    return "M" + "L".join(f"{_x(x, last)} {_y(y)}" for x, y in points)


def _x(x: float, last: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * x / last, 1)


def _y(share: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 1)


def _read(name: str) -> Any:  # noqa: ANN401 - whatever the file holds
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def _by(runs: Sequence[Mapping[str, Any]], key: str, label: str = "{}") -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(label.format(run[key]), []).append(run)
    return found


def _additions() -> Chart:
    runs = _by(_read("algorithms/results.json")["runs"], "workflow")
    curves = {name: [list(zip(r["steps"], r["accuracy"], strict=True)) for r in some] for name, some in runs.items()}
    return Chart("step", curves)


def _signal() -> Chart:
    runs = _by(_read("algorithms/signal_game.json")["runs"], "variant")
    return Chart("step", {name: [_smoothed(run["curve"]) for run in some] for name, some in runs.items()})


def _smoothed(values: Sequence[float], width: int = 10) -> Curve:
    """Means of ten steps each, as a single step has few episodes."""
    firsts = range(0, len(values) - width + 1, width)
    return [(first + width / 2, fmean(values[first : first + width])) for first in firsts]


def _search() -> Chart:
    runs = _read("performance/search.json")["runs"]
    curves = {f"seed {run['seed']}": [[(int(step), y) for step, y in run["search"].items()]] for run in runs}
    return Chart("step", curves)


def _srpo() -> Chart:
    names = {"grpo": "GRPO", "srpo_start": "SRPO, from the start", "srpo_task": "SRPO, by task"}
    curves = _read("performance/srpo.json")["tables"]["curves"]
    return Chart("evaluation", {names[key]: [list(enumerate(curve)) for curve in some] for key, some in curves.items()})


def _to_target(curves: Mapping[str, Mapping[str, Curve]], x_label: str, names: Mapping[str, str]) -> Chart:
    """Success of each seed until the run was stopped."""
    return Chart(x_label, {names[key]: list(curves[key].values()) for key in names})


def _staleness() -> Chart:
    runs = _by(_read("performance/staleness.json"), "bound", "bound {}")
    return Chart("evaluation", {name: [list(enumerate(run["curve"])) for run in some] for name, some in runs.items()})


def _lora() -> Chart:
    runs = _by(_read("performance/lora.json"), "way")
    return Chart("evaluation", {name: [list(enumerate(run["curve"])) for run in some] for name, some in runs.items()})


def _counting() -> Chart:
    runs = _read(COUNTING["GRPO"])
    return Chart(
        "step", {f"seed {run['seed']}": [[(int(step), y) for step, y in run["curve"].items()]] for run in runs}
    )


def with_counting(page: str) -> str:
    """The page about images with what `benchmarks/counting.py` has measured between its marks."""
    alone, critic = (_read(file) for file in COUNTING.values())
    imitation, reinforcement = (median(run[f"{name}_s"] for run in alone) for name in ("imitation", "reinforcement"))
    text = (
        f"With one worker and one thread, imitation took {imitation:.0f} seconds and reinforcement {reinforcement:.0f} "
        "(medians, start and evaluations included, two runs at a time on two cores that did nothing else). Right "
        "answers to 512 held-out questions; a guess is right once in six, which is 16.7%:"
    )
    slower = f"With a critic, in {median(run['reinforcement_s'] for run in critic):.0f} seconds next to other programs:"
    return between(page, "counting", "\n\n".join((text, _learned("GRPO"), slower, _learned("PPO"))))


def _learned(name: str) -> str:
    """A table of the accuracy of some seeds after imitation, and in the steps of reinforcement."""
    runs = _read(COUNTING[name])
    last = max(map(int, runs[0]["curve"]))
    shown = {
        f"{step} steps of {name}" if step else "imitation": [run["curve"][str(step)] for run in runs]
        for step in SHOWN
        if step <= last
    }
    shown[f"{last} steps, pictures of other questions"] = [run["shuffled"] for run in runs]
    rows = [(label, *(f"{share:.1%}" for share in shares)) for label, shares in shown.items()]
    return table_of(("after", *(f"seed {run['seed']}" for run in runs)), rows)


def with_gallery(page: str) -> str:
    """The gallery with its table, and with what the arm has learned, between their marks."""
    return between(between(page, "gallery robot", _robot()), "gallery table", _outcomes())


def _robot() -> str:
    runs = _read("performance/robot.json")
    steps = [int(step) for step in runs["0"]["success"]]
    shares = {step: [run["success"][str(step)] for run in runs.values()] for step in steps}
    rows = [
        (seed, *(f"{run['success'][str(step)]:.1%}" for step in steps), f"{run['seconds']:.0f}")
        for seed, run in runs.items()
    ]
    rows.append(("mean", *(f"{fmean(some):.1%}" for some in shares.values()), ""))
    rows.append(("spread, points", *(f"{100 * (max(some) - min(some)):.1f}" for some in shares.values()), ""))
    return (
        "A line below each strip of seed 0 is green where the arm has reached the right block, and red where it has "
        "not. Success on 512 tables that it has never seen, after imitation (step 0) and by step of reinforcement "
        "learning, from the same demonstrations, and seconds of all steps on busy cores; the spread is from the lowest "
        "seed to the highest:\n\n" + table_of(("seed", *map(str, steps), "seconds"), rows)
    )


def _outcomes() -> str:
    sums = _by(_read("algorithms/results.json")["runs"], "workflow")
    rows = [
        (f"`{name}`", "additions", *_from_to([(r["accuracy"][0], r["accuracy"][-1]) for r in runs]))
        for name, runs in sums.items()
    ]
    for name, runs in _by(_read("performance/lora.json"), "way").items():
        ends = [(run["curve"][0], run["curve"][-1]) for run in runs]
        rows.append((f"`grpo`, {name} (LoRA page)", "additions", *_from_to(ends)))
    for name, file in COUNTING.items():
        curves = [[*run["curve"].values()] for run in _read(file)]
        ends = [(curve[0], curve[-1]) for curve in curves]
        rows.append((f"`{name.lower()}`", "counting in pictures", *_from_to(ends)))
    searches = _read("performance/search.json")["runs"]
    rows.append(
        ("`grpo` with a search tool", "questions", *_from_to([(r["search"]["0"], r["search"]["60"]) for r in searches]))
    )
    for name, runs in _by(_read("algorithms/signal_game.json")["runs"], "variant").items():
        ends = [(fmean(run["curve"][:10]), fmean(run["curve"][-10:])) for run in runs]
        rows.append((name, "signal game", *_from_to(ends)))
    names = {"grpo": "`grpo`", "srpo_start": "`srpo`, from the start", "srpo_task": "`srpo`, by task"}
    for key, curves in _read("performance/srpo.json")["tables"]["curves"].items():
        rows.append((names[key], "table of blocks", *_from_to([(curve[0], curve[-1]) for curve in curves])))
    return table_of(("recipe", "task", "at first", "at the end", "seeds"), rows)


def _from_to(ends: Sequence[tuple[float, float]]) -> tuple[str, str, str]:
    firsts, lasts = zip(*ends, strict=True)
    return _range(firsts), _range(lasts), str(len(ends))


def _range(values: Sequence[float]) -> str:
    mean = f"{fmean(values):.1%}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.1%} to {max(values):.1%})"


def with_evidence(page: str) -> str:
    """The page about controllers with what `benchmarks/data_coordinator.py` has measured between its marks."""
    return between(between(page, "why measured", _sentences()), "why table", _table())


WAYS = {
    "ours": "leaderless",
    "packed": "controller, gloo, not padded",
    "gloo": "controller, gloo",
    "ray": "controller, Ray",
}


def _transitions(hosts: int) -> dict[str, dict[str, float]]:
    """Medians over repeats of a transition from pool to pool, by way."""
    found = {}
    for way in WAYS:
        some = [
            one
            for one in _read("scaling/hosts.json")["transitions"]
            if one["way"] == way
            and one["case"]["kind"] == "pools"
            and one["case"]["hosts"] == hosts
            and one["case"]["prompts"] == 1024
            and one["case"]["max_tokens"] == 1024
        ]
        found[way] = {name: median(one[name] for one in some) for name in ("seconds", "busiest_bytes", "peak_bytes")}
    return found


def _sentences() -> str:
    here = _transitions(8)
    ours, bare = here["ours"], here["packed"]

    def times(name: str) -> str:
        return f"{bare[name] / ours[name]:.1f}"

    return (
        "Eight hosts (network namespaces on one machine, 500 Mbit/s each) hand the rows of a step from one half of "
        f"them to the other. leaderless takes {ours['seconds']:.2f} s. A single process that receives all rows and "
        f"sends them on, without padding, takes {bare['seconds']:.2f} s: {times('seconds')} times as long, with "
        f"{times('busiest_bytes')} times the bytes at the busiest interface and {times('peak_bytes')} times the memory "
        f"in the fullest process. Two more controllers, which pad as many do, take {here['gloo']['seconds']:.1f} s "
        f"(gloo) and {here['ray']['seconds']:.1f} s (Ray's object store)."
    )


def _table() -> str:
    rows = []
    for hosts in (2, 4, 8):
        for way, one in _transitions(hosts).items():
            rows.append(
                (
                    str(hosts),
                    WAYS[way],
                    f"{one['seconds']:.2f}",
                    f"{one['busiest_bytes'] / 1e6:,.0f}",
                    f"{one['peak_bytes'] / 1e6:,.0f}",
                )
            )
    return table_of(("hosts", "way", "seconds", "busiest interface, MB", "fullest process, MB"), rows)
