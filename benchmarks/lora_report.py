"""The results of `lora.py`, `lora_sync.py` and `lora_vllm.py` as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/lora.json"
SYNCS, LOADS = RESULTS.with_name("lora_sync.json"), RESULTS.with_name("lora_vllm.json")
EVERY, NUM_LAST = 10, 3
"""Steps between evaluations, and evaluations at the end of a run whose mean is its accuracy."""
FULL = "all weights"
SHARE = 0.9
"""Of what the training of all weights gains."""


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        way: Weights that are trained.
        seed: Seed of the order of the prompts and of the sampling.
        curve: Held-out accuracy, from that of the model that runs begin with, evaluation by evaluation.
    """

    way: str
    seed: int
    curve: list[float]

    @property
    def accuracy(self) -> float:
        """Held-out accuracy at the end."""
        return fmean(self.curve[-NUM_LAST:])

    def steps_to(self, accuracy: float) -> float:
        """Steps until an accuracy was reached for the first time."""
        return next((EVERY * place for place, found in enumerate(self.curve) if found >= accuracy), float("inf"))


@dataclass(frozen=True)
class Sync:
    """What it takes to send weights.

    Attributes:
        model: Model whose size they have.
        mbit_per_s: Rate of the interface of each host.
        way: Weights that are sent.
        num_bytes: Bytes on the wire.
        seconds: Seconds until all have arrived, once for each turn.
    """

    model: str
    mbit_per_s: float
    way: str
    num_bytes: int
    seconds: list[float]


@dataclass(frozen=True)
class Load:
    """What it takes until a vLLM in another process has weights.

    Attributes:
        model: Model whose size they have.
        way: Weights that are loaded.
        num_bytes: Bytes of these weights, in the type in which vLLM computes.
        seconds: Seconds until vLLM has them, once for each version.
        seconds_inside: Seconds of these in which vLLM's process reads and loads them.
    """

    model: str
    way: str
    num_bytes: int
    seconds: list[float]
    seconds_inside: list[float]


def load(file: Path = RESULTS) -> list[Outcome]:
    """The runs that have been saved."""
    return [Outcome(**found) for found in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    titles = ("trained", "accuracy at first", "at the end (range)", f"steps to {SHARE:.0%} of the full gain (range)")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    full = {one.seed: one for one in outcomes if one.way == FULL}
    for way in dict.fromkeys(one.way for one in outcomes):
        own = [one for one in outcomes if one.way == way and one.seed in full]
        if own:
            ends, needed = [100 * one.accuracy for one in own], [steps_needed(one, full[one.seed]) for one in own]
            lines.append(
                f"| {way} | {100 * fmean(one.curve[0] for one in own):.1f} % | "
                f"{fmean(ends):.1f} % ({min(ends):.1f}-{max(ends):.1f}) | "
                f"{median(needed):.0f} ({min(needed):.0f}-{max(needed):.0f}) |"
            )
    return "\n".join(lines)


def steps_needed(one: Outcome, full: Outcome) -> float:
    """Steps until a run had most of what the training of all weights gains with the same seed."""
    return one.steps_to(full.curve[0] + SHARE * (full.accuracy - full.curve[0]))


def load_syncs(file: Path = SYNCS) -> list[Sync]:
    """The transfers that have been measured."""
    return [Sync(**found) for found in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def sync_table(syncs: Sequence[Sync]) -> str:
    """The transfers as a table in Markdown."""
    lines = ["| size of | sent | MB on the wire | share | seconds (range) |", "| --- | --- | --- | --- | --- |"]
    full = {one.model: one for one in syncs if one.way == FULL}
    for one in syncs:
        share = one.num_bytes / full[one.model].num_bytes
        lines.append(
            f"| {one.model} | {one.way} | {one.num_bytes / 1e6:,.1f} | {100 * share:.2f} % | "
            f"{median(one.seconds):.2f} ({min(one.seconds):.2f}-{max(one.seconds):.2f}) |"
        )
    return "\n".join(lines)


def load_loads(file: Path = LOADS) -> list[Load]:
    """The loads into vLLM that have been measured."""
    return [Load(**found) for found in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def load_table(loads: Sequence[Load]) -> str:
    """The loads into vLLM as a table in Markdown."""
    lines = ["| size of | loaded | MB | seconds (range) | of these in vLLM |", "| --- | --- | --- | --- | --- |"]
    for one in loads:
        seconds = f"{median(one.seconds):.2f} ({min(one.seconds):.2f}-{max(one.seconds):.2f})"
        lines.append(
            f"| {one.model} | {one.way} | {one.num_bytes / 1e6:,.1f} | {seconds} | {median(one.seconds_inside):.2f} |"
        )
    return "\n".join(lines)
