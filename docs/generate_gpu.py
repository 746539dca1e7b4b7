"""The measurements on a GPU, and what is counted without one, for the page about performance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from generate_markup import between, table_of

NOT_MEASURED = "not measured"


def with_gpu(page: str) -> str:
    """A page with the newest results of `benchmarks/gpu.py` between its two marks."""
    return between(page, "gpu", measured())


def with_decode_counts(page: str) -> str:
    """A page with the newest results of `benchmarks/decode_counts.py` between its two marks."""
    from benchmarks.decode_counts import RESULTS, table

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None
    return between(page, "decode counts", table(results) if results else None)


def with_published(page: str) -> str:
    """A page with what others have published, next to our newest results, between its two marks."""
    from benchmarks.gpu_report import RESULTS
    from benchmarks.published import tables

    results = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"] if RESULTS.exists() else {}
    return between(page, "published", tables(results))


def goals(parts: Mapping[str, Any]) -> str:
    """A table of what is to be reached on one H200, with what was measured of it.

    Args:
        parts: Results of `benchmarks/gpu.py` by part.
    """
    good = {name: part for name, part in parts.items() if "error" not in part and is_of_goals(part)}
    reached = dict.fromkeys(("training", "generation", "weights"), NOT_MEASURED)
    if "training" in good and "speeds" in good:
        seconds = good["training"].get("compiled_forward_backward_s") or good["training"]["forward_backward_s"]
        reached["training"] = f"1.5B: {good['training']['model_flops'] / seconds / good['speeds']['flops']:.0%}"
    if "generation" in good:
        best = max(speed for name, speed in good["generation"]["tokens_per_s"].items() if "transformers" not in name)
        reached["generation"] = f"{best / good['generation']['bound_tokens_per_s']:.0%}"
    if "weights" in good:
        sent = good["weights"]
        native, apart = (7.6e9 * 2 * sent["seconds"][way] / sent["bytes"] for way in ("native", "apart"))
        reached["weights"] = (
            f"by those of 1.5B: native {native:.2f} s, in another process {apart:.2f} s without what vLLM adds"
        )
    rows = [
        (
            "training, share of what a large product reaches: 1.5B and 7B, passes of 16k tokens",
            "40 %",
            reached["training"],
        ),
        ("native engine, share of the bound by products and cache: 1.5B, 512 sequences", "60 %", reached["generation"]),
        ("native engine, seconds of vLLM's for the same", "1.5 times", NOT_MEASURED),
        ("weights of 7B from trainer to engine on one machine", "0.5 s", reached["weights"]),
        ("moving and waiting, share of a step", "5 %", NOT_MEASURED),
    ]
    return table_of(("figure", "goal", "measured"), rows)


def is_of_goals(part: Mapping[str, Any]) -> bool:
    """Whether a part was measured with the model of 1.5 billion parameters, and not with a smaller one."""
    preset = part.get("preset", {})
    return (preset.get("hidden"), preset.get("layers")) == (1536, 28)


def measured() -> str:
    """The goals, pictures and a table."""
    from benchmarks.gpu_report import PICTURE, RESULTS, TIMELINE, table

    if not RESULTS.exists():
        return f"There are no results yet: the script has not been run on a GPU.\n\n{goals({})}"
    pictures = {
        PICTURE: "Tokens per second of the ways to generate, relative to the best",
        TIMELINE: "What the device and the host do in three steps of decoding and in a pass of training",
    }
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    shown = [f"![{text}](images/{path.name})" for path, text in pictures.items() if path.exists()]
    return "\n\n".join([goals(results["parts"]), *shown, table(results)])
