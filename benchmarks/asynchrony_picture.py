"""Two pools over time, in lockstep and with continuous generation, one above the other.

    python benchmarks/asynchrony_picture.py  # writes docs/images/asynchrony.png

The runs are those of `asynchrony.py` with heavy-tailed lengths; what is drawn are the traces that they wrote.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from asynchrony import COMMON, WAYS
from made import ROOT, prepare, train

PICTURE = ROOT / "docs/images/asynchrony.png"
STEPS, FIRST, SECONDS = 14, 2, 16.0
"""Steps of a run, the first one that is drawn, and the length of the picture."""
COLORS = {"generating": "#3b7dd8", "waiting": "#e3e3e3", "scoring": "#e8b48a", "training": "#d8813b"}
NAMES = {"rollout": "generating", "generate": "generating", "old": "scoring", "policy": "training"}

Span = tuple[str, float, float]
"""What a rank did, and when it began and ended, in seconds."""


def main() -> None:
    runs = {"lockstep": WAYS["lockstep, 2 + 2 ranks"], "continuous, bound 2": WAYS["continuous, bound 2"]}
    figure, axes = plt.subplots(len(runs), 1, figsize=(9, 4.4), sharex=True)
    for axis, (title, settings) in zip(axes, runs.items(), strict=True):
        ranks = traces(settings)
        begin = min(start for spans in ranks.values() for _, start, _ in spans)
        for rank, spans in ranks.items():
            axis.barh(rank, SECONDS, color=COLORS["waiting"], height=0.8)
            for what, start, end in spans:
                axis.barh(rank, end - start, left=start - begin, color=COLORS[what], height=0.8)
        steps = sum(what == "training" for what, _, end in ranks[3] if end - begin < SECONDS)
        axis.set_title(f"{title}: {steps} steps of training in {SECONDS:g} s", loc="left", fontsize=10)
        axis.set_yticks(sorted(ranks), [f"rank {rank}" for rank in sorted(ranks)], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, SECONDS)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(patches, COLORS, ncols=4, loc="upper right", fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def traces(settings: tuple[str, ...] | list[str]) -> dict[int, list[Span]]:
    """What each rank of a run did, from the first step that is drawn on."""
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as name:
        folder = Path(name)
        prepare(folder, hidden_size=16, num_layers=1, prompt_tokens=8)
        shutil.copy(Path(__file__).with_name("asynchrony_parts.py"), folder)
        train(folder, "run", [*COMMON, f"steps={STEPS}", f"run.trace_steps={STEPS}", *settings], num_workers=4)
        files = sorted((folder / "runs/run/trace").glob("rank-*.json"))
        return {place: _spans(json.loads(file.read_text(encoding="utf-8"))) for place, file in enumerate(files)}


def _spans(events: list[dict[str, float]]) -> list[Span]:
    found: list[Span] = []
    for event in events:
        if event["ph"] != "X" or event["args"]["step"] < FIRST:  # type: ignore[comparison-overlap, index]
            continue
        what, start = str(event["name"]), event["ts"] / 1e6
        kind = "waiting" if what == "wait(weights)" else NAMES.get(what)
        if kind:
            found.append((kind, start, start + event["dur"] / 1e6))
    return sorted(found, key=lambda span: (span[0] == "waiting", span[1]))  # waiting is drawn over what it is a part of


if __name__ == "__main__":
    main()
