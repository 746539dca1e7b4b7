"""Which stage of a pipeline has which layers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from leaderless.config import RecipeError
from leaderless.planner.memory.vision_size import sees

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a weight, or of what the optimizer keeps of it."""
FIRST = "embed_tokens"
"""The module before all layers; what belongs to no layer and not to it comes after them, except for what sees."""


def check_pipeline(key: str, pp: int, num_layers: int, *, num_added: int = 0) -> None:
    """Refuse stages into which a model cannot be divided.

    Args:
        key: Setting at which the error is.
        pp: Number of stages.
        num_layers: Number of layers.
        num_added: First layers behind which something is added that was seen in images.

    Raises:
        RecipeError: There are more stages than layers, or the first stage has too few layers for what is seen.
    """
    if num_layers < pp:
        layers = f"only {num_layers} layers" if num_layers > 1 else "only 1 layer"
        raise RecipeError.at(key, f"pp={pp}: there are {layers}, and each stage needs one: it can be 1 to {num_layers}")
    if (own := len(layers_of_stage(num_layers, pp, 0))) < num_added:
        most = max(one for one in range(1, pp) if len(layers_of_stage(num_layers, one, 0)) >= num_added)
        raise RecipeError.at(
            key,
            f"pp={pp}: what the model sees is added behind its first {num_added} layers, which the first stage must "
            f"have, but it has {own}: pp can be at most {most}",
        )


def check_adapted_stages(key: str, pp: int, num_layers: int, names: Iterable[str]) -> None:
    """Refuse stages that have nothing to train, where only adapters are trained.

    Args:
        key: Setting of the adapters' targets.
        pp: Number of stages.
        num_layers: Number of layers.
        names: Names of the layers with adapters, or of their weights.

    Raises:
        RecipeError: A stage has no adapters, or the last layer has none.
    """
    found = (LAYER.search(name) for name in names if not sees(name))
    adapted = {int(one[1]) for one in found if one}
    stages = [layers_of_stage(num_layers, pp, stage) for stage in range(pp)]
    # Ranks count the layers by the names of what is trained, so the last layer must be among them.
    wanted = [*stages[:-1], range(num_layers - 1, num_layers)]
    for layers in wanted:
        if adapted.isdisjoint(layers):
            which = f"layers {layers[0]} to {layers[-1]} have" if len(layers) > 1 else f"layer {layers[0]} has"
            raise RecipeError.at(
                key,
                f"pp={pp}: {which} no adapters, but some layer of each stage and the last layer need one: name their "
                "layers, too, or leave out pp",
            )


def layers_of_stage(num_layers: int, pp: int, stage: int) -> range:
    """The layers of a stage: as many on each or, on the first ones, one more; the last one has the head, too."""
    each, more = divmod(num_layers, pp)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stage_of(name: str, num_layers: int, pp: int) -> int:
    """The stage that has a weight; what sees images is on the first one."""
    if sees(name):
        return 0
    found = LAYER.search(name)
    if found is None:
        return 0 if FIRST in name.split(".") else pp - 1
    return next(stage for stage in range(pp) if int(found[1]) in layers_of_stage(num_layers, pp, stage))


def count_layers(names: Iterable[str]) -> int:
    """Number of layers of a model, from the names of its weights."""
    found = (LAYER.search(name) for name in names if not sees(name))
    return 1 + max((int(one[1]) for one in found if one), default=-1)
