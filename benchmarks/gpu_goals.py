"""What is to be reached on one GPU, next to what `benchmarks/gpu.py` has measured of it.

A figure counts only with the model and the work of its goal, and on the GPU that the goals are for: a smaller model, or
another GPU, would promise what these do not reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where the documentation reads it
from model_flops import shares
from published import NOT_MEASURED, table

GPU = "NVIDIA H100 80GB HBM3"
"""Name of the GPU that the goals are for, as torch gives it."""
ROWS = 512
"""Responses that are generated at a time."""
MODELS = {(896, 24): "0.5B", (1536, 28): "1.5B", (3584, 28): "7B"}
"""Names of the models by width and number of layers."""

Part = Mapping[str, Any]
Parts = Mapping[str, Part]


@dataclass(frozen=True)
class Goal:
    """A figure that is to be reached.

    Attributes:
        figure: Name of the figure.
        model: Model with which it is measured, by its number of weights.
        goal: Value that is to be reached.
        measured: Function of a part and of all parts, whose value is what was measured of it, or None where the part
            measures something else.
    """

    figure: str
    model: str
    goal: str
    measured: Callable[[Part, Parts], str | None]


def model_of(part: Part) -> str:
    """Name of the model of a part, or its sizes."""
    preset = part.get("preset", {})
    hidden, layers = preset.get("hidden"), preset.get("layers")
    return MODELS.get((hidden, layers), f"a Qwen2 of {layers} layers of {hidden}")


def passes(part: Part) -> Iterator[tuple[str, float]]:
    """The kinds of layers with which a pass of training was measured, those of a run last, and its seconds."""
    for layers, name in (("eager", "forward_backward_s"), ("compiled", "compiled_forward_backward_s")):
        if part.get(name):
            yield layers, part[name]


def utilization(part: Part, parts: Parts) -> str | None:
    """MFU of a pass of training, compiled if that was measured."""
    speeds = parts.get("speeds", {})
    found = [f"{percent(shares(part, seconds, speeds).mfu)}, {layers} layers" for layers, seconds in passes(part)]
    return found[-1] if found else None


def percent(share: float | None, without: str = "unknown") -> str:
    return without if share is None else f"{share:.0%}"


def decoded(part: Part, _: Parts) -> str | None:
    """Share of the bound that the native engine reaches."""
    if "bound_tokens_per_s" not in part or part["tokens"] != ROWS * part["preset"]["response_tokens"]:
        return None
    native = [speed for name, speed in part["tokens_per_s"].items() if "transformers" not in name]
    return f"{max(native) / part['bound_tokens_per_s']:.0%}" if native else None


def brought(part: Part, _: Parts) -> str | None:
    """Seconds until engines have new weights."""
    if "ranks" not in part:
        return None
    names = {"native": "native {:.2f} s", "apart": "in another process {:.2f} s without what vLLM adds"}
    found = [text.format(part["seconds"][way]) for way, text in names.items() if way in part["seconds"]]
    return ", ".join(found) or None


GOALS = (
    Goal("training, MFU", "0.5B", "at least 35 %", utilization),
    Goal("training, MFU", "1.5B", "at least 45 %", utilization),
    Goal(f"decoding {ROWS} rows, share of the bound by products and cache", "1.5B", "at least 60 %", decoded),
    Goal("new weights from trainer to engine within a machine", "7B", "at most 0.5 s", brought),
)


def goals(parts: Parts) -> str:
    """The goals and what was measured of them, as a table in Markdown.

    Args:
        parts: Results of `benchmarks/gpu.py` by part; empty before it was run.
    """
    rows = [(goal.figure, goal.model, goal.goal, reached(goal, parts)) for goal in GOALS]
    return f"On one {GPU}:\n\n{table(('figure', 'model', 'goal', 'measured'), rows)}"


def reached(goal: Goal, parts: Parts) -> str:
    """What was measured of a goal, with its model and on its GPU."""
    fitting = [part for part in parts.values() if "error" not in part and part.get("device") == GPU]
    found = [goal.measured(part, parts) for part in fitting if model_of(part) == goal.model]
    return next((text for text in found if text is not None), NOT_MEASURED)
