"""Layers of a model by name: which get adapters, and which stage of a pipeline has which. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig

NARROWING = {"o_proj", "down_proj"}
"""Layers whose inputs ranks along `tp` divide; of others, they divide the outputs."""
TEXT_PART, TOWERS = "model.language_model.", ("model.visual.", "model.vision_tower.")
"""How names of layers begin in models that see images: those for text, and those that freezing leaves as they are."""
SIGHT = {"visual", "vision_tower", "multi_modal_projector"}
"""Modules that see images."""


def sees(name: str) -> bool:
    """Whether a weight or a module, by its name, belongs to the part of a model that sees images."""
    return not SIGHT.isdisjoint(name.split("."))


class Linear(NamedTuple):
    """A linear layer, by the name that `transformers` gives it."""

    name: str
    inputs: int
    outputs: int

    @property
    def num_weights(self) -> int:
        """Weights, and a bias."""
        return (self.inputs + 1) * self.outputs


def is_named(name: str, target: str) -> bool:
    """Whether a layer has a name, or one that ends like it."""
    return name == target or name.endswith(f".{target}")


def of_text(names: Iterable[str]) -> list[str]:
    """The layers for text, of all layers of a model."""
    known = [*names]
    return [name for name in known if name.startswith(TEXT_PART)] or known


def packed_bytes(num_weights: int, block: int) -> int:
    """Bytes of weights of 4 bits each, of which each `block` has a scale in float32."""
    return num_weights // 2 + 4 * (num_weights // block)


def check_block(key: str, name: str, inputs: int, block: int, tp: int = 1) -> None:
    """Refuse a block that does not divide the inputs of a layer, of which ranks along `tp` have a part each."""
    if inputs % (block * tp):
        able = [
            size for size in get_args(LoraConfig.model_fields["base_block"].annotation) if inputs % (size * tp) == 0
        ]
        part = f"the {inputs // tp} inputs of {name} that each rank along tp={tp} has"
        what = part if tp > 1 else f"the {inputs} inputs of {name}"
        remedies = [f"set it to {' or '.join(map(str, able))}"] if able else ["leave out base_dtype"]
        remedies += ["leave out tp"] if tp > 1 else []
        raise RecipeError.at(f"{key}.lora.base_block", f"{block} does not divide {what}: {', or '.join(remedies)}")


def check_packed(key: str, block: int, layers: Iterable[Linear], tp: int) -> None:
    """Refuse a block that does not divide the rows of a layer, as ranks along `tp` have them."""
    for name, inputs, _ in layers:
        check_block(key, name, inputs, block, tp if name.rpartition(".")[2] in NARROWING else 1)


def with_adapters(lora: LoraConfig, names: Iterable[str], *, freezes_vision: bool) -> list[str]:
    """The layers that get adapters.

    By default, these are all layers for text. The part that sees has some only where a target names them, and none
    where it is left as it is, except for those with which training begins.
    """
    known = [*names]
    if lora.targets == "all-linear":
        return of_text(known)
    is_left = freezes_vision and lora.adapter is None
    return [
        name
        for name in known
        if not (is_left and name.startswith(TOWERS)) and any(is_named(name, target) for target in lora.targets)
    ]


def decoder_layers(config: Mapping[str, int], sizes: tuple[int, int, int], mixed: Sequence[bool]) -> Iterator[Linear]:
    """The linear layers of a model of text; experts and what chooses them are none.

    Sizes are the widths of what layers take, of their queries, and of their keys or values; layers that are mixed have
    experts.
    """
    hidden, query, key = sizes
    family, dense = str(config["model_type"]), config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or 0
    for number, has_experts in enumerate(mixed):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        if family == "phi3":
            yield Linear(f"{attention}.qkv_proj", hidden, query + 2 * key)
        else:
            for name, width in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
                yield Linear(f"{attention}.{name}", hidden, width)
        yield Linear(f"{attention}.o_proj", query, hidden)
        if has_experts and not shared:
            continue
        inner = shared if has_experts else dense
        if has_experts:
            yield Linear(f"{mlp}.shared_expert_gate", hidden, 1)
            mlp = f"{mlp}.shared_expert"
        if family == "phi3":
            yield Linear(f"{mlp}.gate_up_proj", hidden, 2 * inner)
        else:
            yield Linear(f"{mlp}.gate_proj", hidden, inner)
            yield Linear(f"{mlp}.up_proj", hidden, inner)
        yield Linear(f"{mlp}.down_proj", inner, hidden)


def num_adapter_weights(rank: int, layers: Iterable[Linear]) -> tuple[int, int]:
    """Number of weights of adapters of a `rank`, and how many of them ranks along `tp` do not divide.

    Layers of a vision tower are not divided.
    """
    total = whole = 0
    for name, inputs, outputs in layers:
        total += rank * (inputs + outputs)
        if name.startswith((*TOWERS, "model.multi_modal_projector.")):
            whole += rank * (inputs + outputs)
        else:
            whole += rank * (outputs if name.rpartition(".")[2] in NARROWING else inputs)
    return total, whole


def widest_inputs(layers: Iterable[Linear]) -> tuple[int, int]:
    """The most inputs of a layer: of those that ranks along `tp` do not divide, and of those that they do; or 0."""
    widest = {False: 0, True: 0}
    for name, inputs, _ in layers:
        is_divided = name.rpartition(".")[2] in NARROWING
        widest[is_divided] = max(widest[is_divided], inputs)
    return widest[False], widest[True]


LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a weight, or of what the optimizer keeps of it."""
FIRST = "embed_tokens"
"""The module before all layers; what belongs to no layer and not to it comes after them, except for what sees."""


def check_pipeline(key: str, pp: int, num_layers: int, *, num_added: int = 0) -> None:
    """Refuse more stages than layers, or a first stage without all layers behind which something seen is added."""
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
    """Refuse stages that have nothing to train, where only adapters are trained; the last layer has some, too."""
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
