"""What `benchmarks/gpu.py` has measured, as a table and as pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where the documentation reads it
from gpu_goals import model_of, passes, percent
from gpu_timeline import draw as draw_panels
from model_flops import shares
from published import NOT_MEASURED, device_of
from published import table as markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/gpu.json"
PICTURE = ROOT / "docs/images/gpu.png"
TIMELINE = ROOT / "docs/images/gpu-timeline.png"

Results = dict[str, Any]
Rows = list[tuple[str, str]]
"""Figures with their names."""


def rows(results: Results) -> Rows:
    """Each figure with its name; failed parts with their errors."""
    parts: Mapping[str, Results] = results["parts"]
    good = {name: part for name, part in parts.items() if "error" not in part}
    speeds = good.get("speeds")
    lines = []
    for kind, rows_of in ROWS.items():
        for (name, _, size), part in ((name.partition("@"), part) for name, part in good.items()):
            named = rows_of(part, speeds) if name == kind else []
            lines += [(f"{figure}, {size}" if size else figure, value) for figure, value in named]
    lines += [(f"{name} is not complete", part["problem"]) for name, part in good.items() if "problem" in part]
    return lines + [(f"{name} failed", part["error"]) for name, part in parts.items() if "error" in part]


def suite_rows(tests: Results, _: Results | None) -> Rows:
    counts = f"{tests['passed']}, {tests['failed'] + tests['errors']}, {tests['skipped']}"
    return [("tests passed, failed, skipped", counts)]


def speed_rows(speeds: Results, _: Results | None) -> Rows:
    return [
        ("product of large matrices", f"{speeds['flops'] / 1e12:,.0f} TFLOP/s"),
        ("copying", f"{speeds['bytes_per_s'] / 1e12:.2f} TB/s"),
    ]


def agreement_rows(agreement: Results, _: Results | None) -> Rows:
    return [
        (f"rollout and trainer differ, keys with a bias of {bias}", f"{difference['mean']:.4f} per token")
        for bias, difference in agreement.get("key_bias", {}).items()
    ]


def attention_rows(attention: Results, speeds: Results | None) -> Rows:
    speed = attention["bytes_per_s"]
    share = f" ({speed / speeds['bytes_per_s']:.0%} of copying)" if speeds else ""
    return [("attention of a layer over pages, keys and values", f"{speed / 1e12:.2f} TB/s{share}")]


def generation_rows(generation: Results, _: Results | None) -> Rows:
    best = generation["bound_tokens_per_s"]
    return [
        ("generation at best: products and cache", f"{best:,.0f} tokens/s"),
        *(
            (f"generation, {way}", f"{speed:,.0f} tokens/s ({speed / best:.0%} of the best)")
            for way, speed in generation["tokens_per_s"].items()
        ),
        *memory_rows("generation", generation),
    ]


def decoding_rows(decoding: Results, _: Results | None) -> Rows:
    lines = []
    for name, steps in decoding.get("steps", {}).items():
        work = f"{steps['kernels_per_step']:,.0f} kernels, {steps['clones_per_step']:.0f} clones"
        busy = f"{steps['device_busy']:.0%} busy, the host waits {steps['waits_per_step']:.0f} times"
        lines.append((f"a step of decoding, {name}", f"{steps['ms_per_step']:.1f} ms, {work}, {busy}"))
    return lines


def weight_rows(sent: Results, _: Results | None) -> Rows:
    gigabytes, count = sent["bytes"] / 1e9, f"{sent['ranks']} GPU{'s' * (sent['ranks'] > 1)}"
    lines = [
        (f"new weights in {name}, {count}", f"{gigabytes / sent['seconds'][way]:.1f} GB/s")
        for way, name in (("native", "the native engine"), ("apart", "an engine in another process"))
        if way in sent["seconds"]
    ]
    if "copy_s" in sent:
        copied = f"{gigabytes / sent['copy_s']:.1f} GB/s, the host waits {1e3 * sent['copy_host_s']:.0f} ms"
        lines.append(("weights copied for a channel", copied))
    return lines


def timeline_rows(timeline: Results, _: Results | None) -> Rows:
    lines = []
    for title, panel in timeline.get("panels", {}).items():
        kinds = ", ".join(f"{kind} {ms / panel['ms']:.0%}" for kind, ms in panel["kinds"].items())
        lines.append((f"{title}, in the picture", f"{panel['ms']:.1f} ms, {panel['busy']:.0%} busy; {kinds}"))
    return lines


def quickstart_rows(quickstart: Results, _: Results | None) -> Rows:
    accuracy = " → ".join(f"{value:.1%}" for value in quickstart["accuracy"]) or "not evaluated"
    return [("quickstart", f"{sum(quickstart['seconds'].values()):.0f} s, accuracy {accuracy}")]


def training_rows(training: Results, _: Results | None) -> Rows:
    names = {
        "head_in_small_chunks_s": "the head of a pass, in chunks of 2²⁵ logits",
        "head_s": "the head of a pass, in chunks of 2²⁸ logits",
        "step_s": "an update with its optimizer step",
        "log_probs_s": "log-probs of a pass",
    }
    lines = [(name, f"{1e3 * training[key]:.0f} ms") for key, name in names.items() if key in training]
    return [*lines, *memory_rows("an update", training)]


def training_table(parts: Mapping[str, Results]) -> str:
    """Passes of training, forward and backward, with MFU and the share of a large product, as a table in Markdown."""
    titles = ("model", "layers", "tokens", "ms", "TFLOP/s", "MFU", "share of a large product", "device")
    lines = []
    for part in parts.values():
        for layers, seconds in passes(part) if "error" not in part and "model_flops" in part else ():
            found = shares(part, seconds, parts.get("speeds", {}))
            figures = f"{part['tokens']:,}", f"{1e3 * seconds:.0f}", f"{part['model_flops'] / seconds / 1e12:.0f}"
            rates = percent(found.mfu), percent(found.of_large_product, NOT_MEASURED)
            lines.append((model_of(part), layers, *figures, *rates, device_of(part)))
    return markdown(titles, lines) if lines else ""


def memory_rows(what: str, part: Results) -> Rows:
    """The most memory that torch had allocated, next to the estimate of `plan`; none if that was not measured."""
    if "peak_bytes" not in part:
        return []
    peaks = f"{part['peak_bytes'] / 2**30:.1f} of {part['planned_bytes'] / 2**30:.1f} GiB"
    return [(f"most memory in {what}, of what `plan` says", peaks)]


ROWS: dict[str, Callable[[Results, Results | None], Rows]] = {
    "tests": suite_rows,
    "speeds": speed_rows,
    "agreement": agreement_rows,
    "training": training_rows,
    "attention": attention_rows,
    "generation": generation_rows,
    "decoding": decoding_rows,
    "weights": weight_rows,
    "timeline": timeline_rows,
    "quickstart": quickstart_rows,
}
"""What makes the rows of each part, of its results and of the speeds of the GPU if they are known."""


def table(results: Results) -> str:
    """Passes of training as a table in Markdown, then the conditions of the measurement and all other figures."""
    environment = results["parts"].get("environment", {})
    packages = ", ".join(f"{name} {number}" for name, number in environment.get("packages", {}).items())
    usual = (part for name, part in results["parts"].items() if "@" not in name)
    preset = next((part["preset"] for part in usual if "preset" in part), None)
    model = f"; a Qwen2 of {preset['layers']} layers of {preset['hidden']}" if preset else ""
    head = f"{environment.get('device', 'an unknown device')}; {packages}{model}."
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(results))
    figures = f"{head}\n\n| figure | measured |\n| --- | ---: |\n{body}"
    training = training_table(results["parts"])
    return f"{training}\n\n{figures}" if training else figures


def draw(results: Results, path: Path) -> None:
    """Tokens per second of the ways to generate, relative to the best, if matplotlib is installed."""
    generation = results["parts"].get("generation", {"error": "not measured"})
    if "error" in generation or not has_matplotlib():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    speeds = {**generation["tokens_per_s"], "at best": generation["bound_tokens_per_s"]}
    figure, panel = plt.subplots(figsize=(7, 2.6))
    bars = panel.barh(list(speeds), list(speeds.values()), color=["#4269d0"] * (len(speeds) - 1) + ["#9498a0"])
    panel.bar_label(bars, fmt="{:,.0f}", padding=3)
    panel.invert_yaxis()
    panel.margins(x=0.15)
    panel.set_xlabel("tokens per second")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_timeline(results: Results, path: Path) -> None:
    """What the device does when, if that was measured and matplotlib is installed."""
    panels = results["parts"].get("timeline", {}).get("panels")
    if panels and has_matplotlib():
        draw_panels(panels, path)


def has_matplotlib() -> bool:
    if find_spec("matplotlib"):
        return True
    print("matplotlib is not installed here: draw the pictures elsewhere, with gpu.py draw")
    return False
