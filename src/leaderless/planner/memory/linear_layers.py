"""Linear layers of a model by name, and the adapters that they get. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from leaderless.config.models import LoraConfig

NARROWING = {"o_proj", "down_proj"}
"""Layers whose inputs ranks along `tp` divide; of others, they divide the outputs."""
TEXT_PART, TOWERS = "model.language_model.", ("model.visual.", "model.vision_tower.")
"""How names of layers begin in models that see images: those for text, and those that freezing leaves as they are."""


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


def with_adapters(lora: LoraConfig, names: Iterable[str], *, freezes_vision: bool) -> list[str]:
    """The layers that get adapters.

    By default, these are all layers for text. The part that sees has some only where a target names them, and none
    where it is left as it is, except for those with which training begins.

    Args:
        lora: Settings of the adapters.
        names: Linear layers of a model.
        freezes_vision: Whether the part that sees is left as it is.
    """
    known = [*names]
    if lora.targets == "all-linear":
        return [name for name in known if name.startswith(TEXT_PART)] or known
    is_left = freezes_vision and lora.adapter is None
    return [
        name
        for name in known
        if not (is_left and name.startswith(TOWERS)) and any(is_named(name, target) for target in lora.targets)
    ]


def decoder_layers(config: Mapping[str, int], sizes: tuple[int, int, int], mixed: Sequence[bool]) -> Iterator[Linear]:
    """The linear layers of a model of text; experts and what chooses them are none.

    Args:
        config: Configuration of the model.
        sizes: Widths of what layers take, of their queries, and of their keys or values.
        mixed: Whether each layer has experts.
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
    """Number of weights of adapters, and how many of them ranks along `tp` do not divide.

    Args:
        rank: Rows of the first matrix of each.
        layers: Layers that have them; layers of a vision tower are not divided.
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
