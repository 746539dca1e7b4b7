"""Layers that read by recurrence: linear attention, state spaces and short convolutions, of packed sequences.

Such a layer of `transformers` computes all but its convolution and its recurrence token by token. So it is called with
the sequences of a pass as rows of a batch, where padding behind the last token changes nothing before it. What a layer
has to know of a prompt is its state: that of a prompt which sequences share is computed once, and begins each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from leaderless.models.attention.blocks import LengthBuckets, PromptBlock, Repeats, following
from leaderless.models.attention.form import current_pass
from leaderless.models.uploads import placed

_TRIED_TOKENS = 13
"""Tokens of the text with which layers are tried."""
_TOLERANCE = 1e-3
"""Largest error of what they give on, in standard deviations; rounding stays far below it."""
_OF_MAMBA_1 = "dt_proj"
"""Name of a part of mixers of Mamba 1 (arXiv 2312.00752, algorithm 2), whose scan has no initial state."""
_OF_LIGHTNING = "slope_rate"
"""Name of a part of lightning attention (arXiv 2401.04658): the decay of the state of each head."""


@dataclass
class LayerStates:
    """States of a layer after the sequences of a batch, as a cache of `transformers` for this layer.

    Attributes:
        convolutions: [n, channels, kernel] last inputs of convolutions, by their number in the layer.
        recurrences: [n, ...] states of recurrences, by their number in the layer.
    """

    convolutions: dict[int, Tensor] = field(default_factory=dict)
    recurrences: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[LayerStates]) -> LayerStates:
        """The states of several batches, as of one."""
        convolutions, recurrences = (
            {number: torch.cat([kind[number] for kind in kinds]) for number in kinds[0]}
            for kinds in ([one.convolutions for one in parts], [one.recurrences for one in parts])
        )
        return cls(convolutions, recurrences)

    def changed(self, change: Callable[[Tensor], Tensor]) -> LayerStates:
        """What a function makes of all states."""
        convolutions, recurrences = (
            {number: change(states) for number, states in kind.items()}
            for kind in (self.convolutions, self.recurrences)
        )
        return LayerStates(convolutions, recurrences)

    def copy(self) -> LayerStates:
        """The same states in memory of their own."""
        return self.changed(Tensor.clone)

    def advanced(self, mixer: Mixer, rows: Tensor) -> Tensor:
        """Read tokens, [n, tokens, hidden_size], and update the states in place."""
        own = LayerStates({**self.convolutions}, {**self.recurrences})
        result = mixer(rows, own)
        for kept, found in ((self.convolutions, own.convolutions), (self.recurrences, own.recurrences)):
            for number, states in found.items():
                if states is not kept[number]:
                    kept[number].copy_(states)
        return result

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        """The last inputs of a convolution; None before the first token."""
        return self.convolutions.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        """The state of a recurrence; None before the first token."""
        return self.recurrences.get(state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Add inputs [n, channels, tokens] of a convolution; returns them with those before them."""
        before = self.convolutions.get(state_idx)
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        kernel = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        inputs = pad(inputs, (max(0, kernel - inputs.shape[-1]), 0))
        self.convolutions[state_idx] = inputs[..., -kernel:]
        return inputs

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        **_: object,
    ) -> Tensor:
        """Replace the state of a recurrence."""
        self.recurrences[state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state of lightning attention; None before the first token."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Replace the state of lightning attention."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        """Whether there are tokens before."""
        return bool(self.convolutions or self.recurrences)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Whether states of earlier tokens are kept, too; they are not."""
        return False


class Mixer(Protocol):
    """A layer that reads by recurrence."""

    def __call__(self, rows: Tensor, states: LayerStates | None = None) -> Tensor:
        """Read the tokens of sequences, [n, tokens, hidden_size], after what states know, which are updated."""


@dataclass(frozen=True)
class SteppedMixer:
    """A layer that continues from states token by token alone: `transformers` reads several tokens from zeros on.

    It leaves no gradient of the states, so that passes give it whole sequences.

    Attributes:
        read: Function that reads sequences, or one more token of each.
    """

    read: Mixer

    def __call__(self, rows: Tensor, states: LayerStates | None = None) -> Tensor:
        """Read sequences; see `Mixer`."""
        if states is None or not states.has_previous_state():
            return self.read(rows, states)
        return torch.cat([self.read(token, states) for token in torch.split(rows, 1, dim=1)], dim=1)


class RecurrentLayer:
    """The function `forward` of a layer of `transformers` that reads by recurrence, in passes and outside of them.

    Attributes:
        mixer: Function that reads sequences.
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap a layer, which knows its number."""
        self._forward, self._layer = module.forward, cast("int", module.layer_idx)
        names = inspect.signature(self._forward).parameters
        self._cache = next((name for name in ("cache", "cache_params") if name in names), "cache")
        self._unused = dict.fromkeys({"position_embeddings", "attention_mask"} & {*names})
        self._num_results = 1
        self.mixer: Mixer = SteppedMixer(self._read) if hasattr(module, _OF_MAMBA_1) else self._read

    def _read(self, rows: Tensor, states: LayerStates | None = None) -> Tensor:
        found = self._forward(rows, **{**self._unused, self._cache: states})
        if isinstance(found, Tensor):
            return found
        self._num_results = len(found)
        return cast("Tensor", found[0])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden_states: Tensor, *rest: object, **named: object) -> Tensor | tuple[Tensor | None, ...]:
        """Call the layer with [1, T, hidden_size] tokens of a pass; outside of one, as `transformers` does."""
        current = current_pass()
        if current is None:
            return cast("Tensor", self._forward(hidden_states, *rest, **named))
        found = current.attention.recur(self._layer, self.mixer, hidden_states.squeeze(0)).unsqueeze(0)
        return found if self._num_results == 1 else (found, *[None] * (self._num_results - 1))


def read_in_passes(model: nn.Module) -> None:
    """Have the layers of a model that read by recurrence do so in packed passes, from now on."""
    for module in model.modules():
        if is_mixer(module) and not isinstance(module.forward, RecurrentLayer):
            module.forward = RecurrentLayer(module)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module of `transformers` is a layer, or the part of one, that reads by recurrence."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    is_lightning = hasattr(module, _OF_LIGHTNING)
    return (has_convolution or is_lightning) and isinstance(getattr(module, "layer_idx", None), int)


@torch.no_grad()
def states_problem(model: nn.Module, hidden_size: int) -> str:
    """Why states of layers do not begin what follows; empty if they do, exactly. One layer of each class is tried.

    A text is read at once, in two and three parts, and then token by token. In a trial of the whole model, a state that
    counts for little would not be missed.
    """
    generator, tried = torch.Generator().manual_seed(0), set[type]()
    for module in model.modules():
        layer = module.forward
        if not isinstance(layer, RecurrentLayer) or type(module) in tried:
            continue
        tried.add(type(module))
        rows, end = 3 * torch.randn(2, _TRIED_TOKENS, hidden_size, generator=generator), _TRIED_TOKENS - 2
        whole = layer.mixer(rows)[:, end:]
        for lengths in ([end, 2], [end - 4, 4, 2], [end, 1, 1]):
            states = LayerStates()
            found = torch.cat([layer.mixer(part, states) for part in torch.split(rows, lengths, dim=1)], dim=1)[:, end:]
            error = float((found - whole).abs().max() / whole.std().clamp(min=1e-12))
            if not error < _TOLERANCE:
                return f"layers of class {type(module).__name__} do not continue from their states, by {error:.2g}"
    return ""


class _Rows:
    """Sequences that are read in one call, padded to the longest."""

    def __init__(self, members: Sequence[range], before: Repeats | None, device: torch.device) -> None:
        """Plan to read tokens of a pass, after those of all blocks that are taken if there are any."""
        # A single token after others would be read in place, as while decoding, which leaves no gradient.
        longest = max([2 * (before is not None), *map(len, members)])
        steps, ends = torch.arange(longest), torch.tensor([[own.stop - 1] for own in members])
        tokens = torch.minimum(torch.tensor([[own.start] for own in members]) + steps, ends)
        is_real = steps < torch.tensor([[len(own)] for own in members])
        self._tokens = placed(tokens.flatten(), device)
        self._shape = tokens.shape
        self._real = placed(is_real.flatten().nonzero().squeeze(1), device)
        self.before = before
        self.places = torch.cat([torch.arange(own.start, own.stop) for own in members])

    def read(self, mixer: Mixer, hidden: Tensor, states: LayerStates | None) -> Tensor:
        """The results of the real tokens, in the order of `places`."""
        rows = hidden.index_select(0, self._tokens).view(*self._shape, hidden.shape[1])
        return mixer(rows, states).flatten(0, 1).index_select(0, self._real)


class RecurrentPasses:
    """Calls in which layers read the blocks of a pass: each after the block that it continues."""

    def __init__(self, blocks: Sequence[PromptBlock], device: torch.device) -> None:
        shared = following(blocks)
        # The state behind padding would not be that of a block, so that those read together are equally long.
        by_length = dict[tuple[int, int], list[PromptBlock]]()
        for block in blocks:
            if block.own in shared:
                by_length.setdefault((len(block.before), len(block.own)), []).append(block)
        number, self._shared, self._rest = dict[range, int](), list[list[_Rows]](), list[_Rows]()

        def rows_of(members: Sequence[PromptBlock]) -> _Rows:
            places = [number[block.before[-1]] for block in members if block.before]
            before = Repeats(torch.tensor(places), len(number), device) if places else None
            return _Rows([block.own for block in members], before, device)

        for _, same in groupby(sorted(by_length), itemgetter(0)):
            level = [by_length[depth, length] for depth, length in same]
            self._shared.append([rows_of(members) for members in level])
            number |= {block.own: len(number) + i for i, block in enumerate(chain.from_iterable(level))}
        for is_later in (False, True):
            rest = [block for block in blocks if bool(block.before) == is_later and block.own not in shared]
            self._rest += [rows_of([rest[i] for i in some]) for some in _alike([len(block.own) for block in rest])]
        places = torch.cat([rows.places for rows in (*chain(*self._shared), *self._rest)])
        self._order = placed(places.argsort(), device)

    def recur(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Read [T, hidden_size] tokens of a pass."""
        found, known = list[Tensor](), list[LayerStates]()

        def before(rows: _Rows) -> LayerStates | None:
            return None if rows.before is None else known[0].changed(rows.before.take)

        for level in self._shared:
            kept = [before(rows) or LayerStates() for rows in level]
            found += [rows.read(mixer, hidden, states) for rows, states in zip(level, kept, strict=True)]
            known = [LayerStates.joined([*known, *kept])]
        found += [rows.read(mixer, hidden, before(rows)) for rows in self._rest]
        return torch.cat(found).index_select(0, self._order)


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """The numbers of sequences of similar length, in groups, as of `LengthBuckets`."""
    if not lengths:
        return []
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    number = {start: place for place, start in enumerate(starts)}
    buckets = LengthBuckets(lengths, torch.device("cpu"))
    return [[number[begin] for begin in bucket.begins.tolist()] for bucket in buckets.all]
