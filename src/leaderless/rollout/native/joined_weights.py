"""Weights of linear layers that read the same values, next to each other in memory: one product for all of them.

With few rows the products of a layer are small: keys and values leave most of a GPU idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from leaderless.models.scoring import linear_for_few


class Joined(NamedTuple):
    """Layers as one.

    Attributes:
        weight: [outputs of all, inputs].
        bias: [outputs of all], or None.
        sizes: Outputs of each.
    """

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]

    def multiply(self, values: Tensor) -> Sequence[Tensor]:
        """Apply the layers to [T, inputs]; outputs are [T, outputs] views of one tensor."""
        return torch.split(linear_for_few(values, self.weight, self.bias), self.sizes, dim=-1)


class LeanLayer(NamedTuple):
    """A decoder layer, and what is joined of it.

    Attributes:
        module: Layer.
        queries: Layers for queries, keys and values; None if they are separate.
        gates: The first two layers of the feed-forward part; None if they are separate, or if there is another one.
    """

    module: nn.Module
    queries: Joined | None = None
    gates: Joined | None = None


class JoinedWeights:
    """Memory for the weights of decoder layers.

    Only plain linear layers are joined: one with an adapter has a weight that is not the engine's own, and may be
    another model's, too.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._groups = list[tuple[_Group | None, _Group | None]]()
        for layer in self._layers:
            attention, mlp = cast("nn.Module", layer.self_attn), cast("nn.Module", layer.mlp)
            queries = _Group.of([getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")])
            self._groups.append((queries, _Group.of([getattr(mlp, name, None) for name in ("gate_proj", "up_proj")])))
        self._places = {
            cast("nn.Parameter", parameter): (block, place)
            for groups in self._groups
            for group in groups
            if group is not None
            for block in group.blocks
            for place, parameter in enumerate(block.parameters)
        }

    def room(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Memory that a parameter takes from now on, next to other parameters; None for one that is not joined."""
        if parameter not in self._places:
            return None
        block, place = self._places[parameter]
        return block.room(place, dtype, device)

    def release(self) -> None:
        """Release the memory, which no parameter takes any more."""
        for block, _ in self._places.values():
            block.release()

    def layers(self) -> Sequence[LeanLayer]:
        """The decoder layers. What is joined of them has all of its weights in this memory."""
        return [
            LeanLayer(layer, *(None if group is None else group.joined() for group in groups))
            for layer, groups in zip(self._layers, self._groups, strict=True)
        ]


class _Block:
    """Memory of some parameters, one below the other."""

    def __init__(self, parameters: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> None:
        self.parameters, self._shapes = parameters, shapes
        self.release()

    def release(self) -> None:
        self._memory = nn.Parameter(torch.empty(0), requires_grad=False)
        self._inside = set[int]()

    def room(self, place: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._inside or self._memory.dtype != dtype:
            rows = sum(shape[0] for shape in self._shapes)
            memory = torch.empty(rows, *self._shapes[0][1:], dtype=dtype, device=device)
            # As for the weights of modules, `torch.compile` makes kernels for these sizes alone.
            self._memory = nn.Parameter(memory, requires_grad=False)
            self._inside.clear()
        self._inside.add(place)
        begin = sum(shape[0] for shape in self._shapes[:place])
        return self._memory[begin : begin + self._shapes[place][0]]

    def whole(self) -> Tensor | None:
        """The memory, if all parameters take it."""
        return self._memory if len(self._inside) == len(self.parameters) else None


class _Group(NamedTuple):
    """Linear layers with the same input."""

    blocks: Sequence[_Block]
    sizes: list[int]

    @classmethod
    def of(cls, linears: Sequence[object]) -> _Group | None:
        """The group of some layers; None if they are not all plain linear layers with the same inputs."""
        known = [one for one in linears if type(one) is nn.Linear]
        if len(known) < len(linears) or len({(one.in_features, one.bias is None) for one in known}) > 1:
            return None
        sizes = [one.out_features for one in known]
        blocks = [_Block([one.weight for one in known], [(one.out_features, one.in_features) for one in known])]
        if known[0].bias is not None:
            blocks.append(_Block([one.bias for one in known], [(size,) for size in sizes]))
        return cls(blocks, sizes)

    def joined(self) -> Joined | None:
        """The layers as one, if all of their weights are in memory of their own."""
        whole = [block.whole() for block in self.blocks]
        found = [one for one in whole if one is not None]
        if len(found) < len(whole):
            return None
        return Joined(found[0], found[1] if len(found) > 1 else None, self.sizes)
