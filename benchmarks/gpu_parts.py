"""The parts of `benchmarks/gpu.py`, each in a separate process.

    python benchmarks/gpu_parts.py PART DEVICE PRESET [TOKENS]

A part prints its result as a line of JSON after a mark. Its module is imported for it alone: if that fails with the
torch of a machine, parts in other modules are still measured. TOKENS are those of a training pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch

from gpu_machine import PRESETS, Machine, Result

MODULES = {
    "speeds": "gpu_device",
    "attention": "gpu_rollout",
    "generation": "gpu_rollout",
    "decoding": "gpu_rollout",
    "agreement": "gpu_training",
    "weights": "gpu_weights",
    "training": "gpu_training",
    "timeline": "gpu_timeline",
    "quickstart": "gpu_quickstart",
    "published_verl": "gpu_published",
    "published_one": "gpu_published",
    "published_many": "gpu_published",
}
"""Module of each part, which is a function of the same name."""


def part_named(name: str) -> Callable[[Machine], Result]:
    part: Callable[[Machine], Result] = getattr(import_module(MODULES[name]), name)
    return part


def main() -> None:
    name, device, preset, *tokens = sys.argv[1:]
    sizes = PRESETS[preset]
    if tokens:
        sizes = replace(sizes, pass_tokens=int(tokens[0]))
    machine = Machine(torch.device(device), sizes)
    machine.say(part_named(name)(machine))


if __name__ == "__main__":
    main()
