"""How the tokens of each layer attend to those before them, as the description of a model says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, cast

SETTINGS = (
    "num_hidden_layers",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "attention_chunk_size",
    "attn_logit_softcapping",
)
"""Settings of a model that say how its layers attend."""
FULL_LAYER, WINDOW_LAYER, CHUNK_LAYER = "full_attention", "sliding_attention", "chunked_attention"
"""Types of layers with attention, as `layer_types` names them."""
INDEXED_LAYER = "indexed_attention"
"""Type of layers whose tokens attend to those keys before them that an indexer chooses."""
RECURRENT_LAYERS = ("linear_attention", "conv")
"""Types of layers that read by recurrence alone; those of type hybrid also have attention."""
SINGLE_TOKEN_LAYERS = ("mlp", "moe")
"""Types of layers that read each token alone."""


@dataclass(frozen=True)
class AttentionKind:
    """How the tokens of a layer attend: to a range of tokens that ends with themselves.

    Attributes:
        window: Most tokens to which one attends, itself included; None for all.
        chunk: Tokens of the chunks into which a sequence is divided, which attend to themselves alone; None for one
            chunk.
        softcap: Number c that bounds scores s, as c tanh(s / c); None for no bound.
        is_recurrent: Whether the layer has a state that its tokens change, one after the other.
        has_attention: Whether its tokens attend at all.
        is_indexed: Whether an indexer chooses the keys to which its tokens attend.
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    is_recurrent: bool = False
    has_attention: bool = True
    is_indexed: bool = False

    @property
    def sees_all(self) -> bool:
        """Whether tokens attend to all tokens before them."""
        return self.window is None and self.chunk is None and not self.is_indexed

    def first_key(self, position: int) -> int:
        """The first of the positions to which the token at a position attends."""
        after_window = 0 if self.window is None else position - self.window + 1
        return max(0, after_window, 0 if self.chunk is None else position - position % self.chunk)


FULL = AttentionKind()


class AttentionSizes(TypedDict, total=False):
    """Arguments of an `AttentionKind` that follow from the type of a layer."""

    window: int | None
    chunk: int | None
    is_recurrent: bool
    has_attention: bool
    is_indexed: bool


def attention_kinds(described: Mapping[str, object]) -> tuple[AttentionKind, ...]:
    """The kind of attention of each layer.

    Args:
        described: Description of the part of a model that reads text, as in its `config.json`. Without types of its
            layers, all have the window if there is one.

    Raises:
        ValueError: A layer is of a type that cannot be computed, or has no size of its window or chunk.
    """
    window, chunk, most = (
        cast("int | None", described.get(name))
        for name in ("sliding_window", "attention_chunk_size", "max_window_layers")
    )
    first = 0
    if (is_used := described.get("use_sliding_window")) is not None:  # as Qwen2 describes it
        window, first = (window, most or 0) if is_used else (None, 0)
    sizes: dict[str, AttentionSizes] = {WINDOW_LAYER: {"window": window}, CHUNK_LAYER: {"chunk": chunk}}
    sizes |= {FULL_LAYER: {}, INDEXED_LAYER: {"is_indexed": True}, "hybrid": {"is_recurrent": True}}
    sizes |= {name: {"has_attention": False, "is_recurrent": True} for name in RECURRENT_LAYERS}
    sizes |= {name: {"has_attention": False} for name in SINGLE_TOKEN_LAYERS}
    usual = FULL_LAYER if window is None else WINDOW_LAYER
    count = cast("int | None", described.get("num_hidden_layers")) or 0
    types = cast("list[str] | None", described.get("layer_types")) or [
        FULL_LAYER if layer < first else usual for layer in range(count)
    ]
    if unknown := sorted({*types} - {*sizes}):
        raise ValueError(f"layers of type {unknown[0]} are not supported, only {', '.join(sizes)}")
    for type_of_layer, size in sizes.items():
        if type_of_layer in types and None in size.values():
            raise ValueError(f"layers of type {type_of_layer} have no size: set sliding_window or attention_chunk_size")
    softcap = cast("float | None", described.get("attn_logit_softcapping"))
    return tuple(AttentionKind(**sizes[one], softcap=softcap) for one in types)
