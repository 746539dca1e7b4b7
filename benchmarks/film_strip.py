"""What the quickstart's arm did before and after it learned, as a picture and as numbers, from the folder of its run.

    leaderless quickstart --robot
    python benchmarks/film_strip.py runs/quickstart-robot

writes the numbers under the seed of the run in `docs/performance/robot.json`, which `docs/generate.py` reads, and for
seed 0 also `docs/images/gallery-reach.png`. `leaderless quickstart --robot seed=1` runs another seed.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, ImageDraw

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM_SHOWN, SCALE = 4, 2
LABEL, MARGIN = 16, 8
"""Height of the line above a strip, and the space around, in pixels."""
URL = "data:image/png;base64,"


def evaluations(run: Path) -> dict[int, list[Mapping[str, Any]]]:
    """The recorded episodes of each evaluation, by step."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for path in sorted((run / "samples").glob("evaluation-*.rank-*.jsonl")):
        step = int(path.name.split(".")[0].removeprefix("evaluation-"))
        lines = path.read_text(encoding="utf-8").splitlines()
        found.setdefault(step, []).extend(json.loads(line) for line in lines)
    return found


def chosen(before: list[Mapping[str, Any]], after: list[Mapping[str, Any]]) -> list[int]:
    """The first prompts whose episodes both evaluations have recorded, those that failed before in front."""
    known = {row["group_id"]: row for row in after}
    both = [row for row in before if row["group_id"] in known and row.get("images")]
    return [row["group_id"] for row in sorted(both, key=lambda row: row["reward"])][:NUM_SHOWN]


def picture(rows: list[tuple[str, Mapping[str, Any]]]) -> Image.Image:
    """Strips below each other, each under a line that says what it shows."""
    strips = [Image.open(io.BytesIO(base64.b64decode(row["images"][0].removeprefix(URL)))) for _, row in rows]
    large = [strip.resize((strip.width * SCALE, strip.height * SCALE), Image.Resampling.NEAREST) for strip in strips]
    height = sum(strip.height + LABEL + MARGIN for strip in large) + MARGIN
    page = Image.new("RGB", (max(strip.width for strip in large) + 2 * MARGIN, height), "white")
    draw, top = ImageDraw.Draw(page), MARGIN
    for (label, _), strip in zip(rows, large, strict=True):
        draw.text((MARGIN, top), label, fill=(60, 60, 60))
        page.paste(strip, (MARGIN, top + LABEL))
        top += strip.height + LABEL + MARGIN
    return page.quantize(64)


def shown(played: Mapping[int, list[Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """What the picture has, before and after, each with the line above it."""
    first, last = min(played), max(played)
    return [
        (f"{row['prompt']}, {when}: {row['response']}", row)
        for group in chosen(played[first], played[last])
        for when, rows in ((f"before step {first + 1}", played[first]), (f"after step {last}", played[last]))
        for row in rows
        if row["group_id"] == group
    ]


def main() -> None:
    """Write the picture and the numbers of the run that the command line names."""
    run = Path(sys.argv[1])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    success = {row["step"]: row["evaluation/mean@1"] for row in logged if "evaluation/mean@1" in row}
    seed = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("seed", 0)
    numbers = {"success": success, "seconds": round(sum(row.get("time/step", 0.0) for row in logged), 1)}
    file = DOCS / "performance/robot.json"
    table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    table[str(seed)] = numbers
    file.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")
    if seed == 0:
        picture(shown(evaluations(run))).save(DOCS / "images/gallery-reach.png", optimize=True)


if __name__ == "__main__":
    main()
