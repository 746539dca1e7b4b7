"""Which stage of a pipeline has which layers. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from leaderless.config import RecipeError
from leaderless.planner.vision_size import sees

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a weight, or of what the optimizer keeps of it."""
FIRST = "embed_tokens"
"""The module before all layers; what belongs to no layer and not to it comes after them, except for what sees."""


def check_pipeline(key: str, pp: int, num_layers: int, *, is_tied: bool, num_added: int = 0) -> None:
    """Refuse stages into which a model cannot be divided.

    Args:
        key: Setting at which the error is.
        pp: Number of stages.
        num_layers: Number of layers.
        is_tied: Whether the head is the embedding.
        num_added: First layers behind which something is added that was seen in images.

    Raises:
        RecipeError: There are more stages than layers, the head is the embedding, or the first stage has too few layers
            for what is seen.
    """
    if num_layers < pp:
        layers = f"only {num_layers} layers" if num_layers > 1 else "only 1 layer"
        raise RecipeError.at(key, f"pp={pp}: there are {layers}, and each stage needs one: it can be 1 to {num_layers}")
    if is_tied:
        raise RecipeError.at(
            key,
            f"pp={pp}: the model computes logits with the embeddings of its tokens (tie_word_embeddings), so that the "
            "first and the last stage would both train them: use dp, tp and cp instead, or a model with a head of its "
            "own",
        )
    if (own := len(layers_of_stage(num_layers, pp, 0))) < num_added:
        most = max(one for one in range(1, pp) if len(layers_of_stage(num_layers, one, 0)) >= num_added)
        raise RecipeError.at(
            key,
            f"pp={pp}: what the model sees is added behind its first {num_added} layers, which the first stage must "
            f"have, but it has {own}: pp can be at most {most}",
        )


def adapters_in_stages(model: str) -> str:
    """What is wrong with stages of a model with adapters, which has this setting."""
    return f"a model with adapters cannot be divided into stages: use dp, tp and cp, or leave out {model}.lora"


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
