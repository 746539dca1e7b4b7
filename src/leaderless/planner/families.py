"""Families of models, as far as files on this machine name them, and those that ranks cannot divide."""

from __future__ import annotations

import json
from collections.abc import Sequence

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner.backends import backend_of
from leaderless.planner.model_size import model_file
from leaderless.planner.parts import PlannedNode, RoleInstance

# fmt: off
UNDIVIDED = {
    "apertus", "apertus1p5_text", "bert-generation", "biogpt", "bitnet", "codegen", "ctrl", "dbrx", "emu3", "fuyu",
    "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "hunyuan_v1_dense", "jetmoe", "longcat_flash",
    "moshi", "moss_transcribe_diarize", "olmo2", "opt", "persimmon", "phi", "phi3", "phi4_multimodal", "starcoder2",
    "whisper", "youtu",
}
# fmt: on
"""Families that are supported, but whose layers ranks cannot divide along `tp`: `models/tensor_parallel.py`."""


def family_of(model: ModelConfig | None) -> str | None:
    """The type of a model; None where no file on this machine says it."""
    path = None if model is None else model_file(model, "config.json")
    if path is None:
        return None
    try:
        family = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return family if isinstance(family, str) else None


def check_divisible(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> None:
    """Refuse tensor parallelism for families whose layers cannot be divided.

    Raises:
        RecipeError: A model of such a family has a layout with `tp`.
    """
    for instance in instances:
        role, layout = instance.role, instance.layout
        backend = backend_of(recipe.as_seen_by(role).training.backend)
        if instance.is_engine_only or layout.tp == 1 or not backend.shards_along_axes:
            continue
        family = family_of(recipe.model_of(role))
        if family in UNDIVIDED:
            node = next(one.name for one in nodes if one.layout == layout and role in dict(one.uses))
            raise RecipeError.at(
                f"layout.{node}.tp",
                f"tp={layout.tp}: the model of '{role}' is of type {family}, whose layers cannot be divided: leave out "
                "tp; ranks along dp divide the weights, and those along cp the tokens",
            )
