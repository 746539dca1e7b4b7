"""The pass in which layers are called: not all layers of `transformers` pass on what their attention needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from leaderless.planner.memory.attention_kinds import AttentionKind

if TYPE_CHECKING:
    from leaderless.models.attention.packed import Attention


class LayerPass(NamedTuple):
    """A pass through the layers of a model.

    Attributes:
        attention: Attention of the tokens.
        kinds: Kind of attention of each layer.
    """

    attention: Attention
    kinds: Sequence[AttentionKind]


_CURRENT: ContextVar[LayerPass | None] = ContextVar("pass", default=None)


def current_pass() -> LayerPass | None:
    """The pass in which a layer is called; None outside of one."""
    return _CURRENT.get()


@contextmanager
def passing(now: LayerPass | None) -> Iterator[None]:
    """Call layers in a pass, or outside of one."""
    token = _CURRENT.set(now)
    try:
        yield
    finally:
        _CURRENT.reset(token)
