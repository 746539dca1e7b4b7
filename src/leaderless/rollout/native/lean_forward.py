"""A shorter way through decoders of known families.

With few rows or a small model, most of a decoding step is Python and small kernels. `transformers` spends them on
masks, caches, transposes and wrappers that are not needed here. The same weights go through the same steps: norm,
queries, keys and values, rotary positions, attention, and the layer's own feed-forward module, experts included.

The weights of linear layers that read the same values are next to each other in memory, so that there is one product
for all of them: with few rows, the products of keys and values alone leave most of a GPU idle.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from leaderless.distributed.errors import is_out_of_memory
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.recurrence import Mixer
from leaderless.models.causal_lm import CausalLM
from leaderless.models.compiled_layers import compiled
from leaderless.models.lora.linear import LoraLinear
from leaderless.models.scoring import linear_for_few

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from leaderless.models.vision.mrope import ImagePositions


class Rotation(NamedTuple):
    """Factors by which queries and keys are rotated.

    Attributes:
        cosine: [T, 1, head_dim].
        sine: [T, 1, head_dim], negated in the first half of a head.
    """

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, cosine: Tensor, sine: Tensor) -> Rotation:
        """The rotation by the cosines and sines of `transformers`, [1, T, head_dim]."""
        cosine, sine = (values.squeeze(0).unsqueeze(1) for values in (cosine, sine))
        half = sine.shape[-1] // 2
        return cls(cosine, torch.cat((-sine[..., :half], sine[..., half:]), dim=-1))


def rotate(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each half of a head of [T, heads, head_dim] with the other, rounded step by step as in `transformers`."""
    return values * cosine + values.roll(values.shape[-1] // 2, -1) * sine


class RotatingAttention(ABC):
    """Attention that rotates queries and keys itself, while it writes keys."""

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Fail: families that read by recurrence go through their own modules."""
        raise AssertionError(f"layer {layer} reads {len(hidden)} tokens by {mixer}")

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        form: AttentionForm,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attend as `Attention` does; a rotation is for queries and keys that are not rotated yet."""


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
        self.memory = nn.Parameter(torch.empty(0), requires_grad=False)
        self._inside, self.is_whole = set[int](), False  # whole: all parameters take the memory

    def room(self, place: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._inside or self.memory.dtype != dtype:
            rows = sum(shape[0] for shape in self._shapes)
            memory = torch.empty(rows, *self._shapes[0][1:], dtype=dtype, device=device)
            # As for the weights of modules, `torch.compile` makes kernels for these sizes alone.
            self.memory = nn.Parameter(memory, requires_grad=False)
            self._inside.clear()
        self._inside.add(place)
        self.is_whole = len(self._inside) == len(self.parameters)
        begin = sum(shape[0] for shape in self._shapes[:place])
        return self.memory[begin : begin + self._shapes[place][0]]


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
        if not all(block.is_whole for block in self.blocks):
            return None
        weight, *bias = (block.memory for block in self.blocks)
        return Joined(weight, bias[0] if bias else None, self.sizes)


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl_text")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Forward(Protocol):
    """A way through a model without a gradient."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor,
        *,
        images: ImagePositions | None = None,
    ) -> Tensor:
        """Compute [R, vocabulary] float32 logits.

        Tokens are [T], positions [T] or, as of `grid_positions`, [3, T], and selected tokens [R]; `images` is what is
        seen at some of the tokens.
        """


def forward_of(model: CausalLM, *, enable_compile: bool) -> Forward:
    """Choose the fastest way through a model with whole weights, for passes without a gradient.

    That is the model itself, unless its family is known, and its attention has no window and rotates whole heads.
    """
    assert not any(kind.is_indexed for kind in model.attention_kinds), "refused when the engine was made"
    config = model.model.config.get_text_config()
    text = cast("PreTrainedModel", model.text_model)
    if config.model_type not in FAMILIES or not hasattr(text, "layers"):  # GOT-OCR has them elsewhere
        return cast("Forward", model)
    head_dim = text.layers[0].self_attn.head_dim
    turned = 2 * len(text.rotary_emb.inv_freq)
    return LeanForward(model, enable_compile) if model.is_plain and turned == head_dim else cast("Forward", model)


class LeanForward:
    """A pass through a decoder of a known family."""

    def __init__(self, model: CausalLM, enable_compile: bool) -> None:
        self._model = model
        self.joined = JoinedWeights(cast("PreTrainedModel", model.text_model).layers)
        self._project, self._finish = project, finish
        if enable_compile:
            self._project, self._finish = _of_two_rows(_compiled(project)), _of_two_rows(_compiled(finish))

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor,
        *,
        images: ImagePositions | None = None,
    ) -> Tensor:
        """Compute the logits of selected tokens, layer by layer, with joined matrices."""
        base = cast("PreTrainedModel", self._model.text_model)
        hidden = base.embed_tokens(tokens)
        if images is not None:
            hidden = images.embed(hidden)
        rotation = Rotation.of(*base.rotary_emb(hidden, positions.unsqueeze(-2)))
        for number, layer in enumerate(self.joined.layers()):
            form = AttentionForm(cast("float", cast("nn.Module", layer.module.self_attn).scaling))
            if isinstance(attention, RotatingAttention):
                attended = attention.attend(number, *self._project(layer, hidden), form, rotation)
            else:
                attended = attention.attend(number, *self._project(layer, hidden, *rotation), form)
            hidden = self._finish(layer, hidden, attended)
            if images is not None:
                hidden = images.add(number, hidden)
        hidden = normalize(base.norm, hidden.index_select(0, select))
        return self._model.logits(hidden)


def project(
    layer: LeanLayer, hidden: Tensor, cosine: Tensor | None = None, sine: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the queries, keys and values of a layer, [T, heads, head_dim] each.

    `hidden` is [T, hidden_size]. Queries and keys are rotated by the factors of a `Rotation`, if these are given.
    """
    attention = cast("nn.Module", layer.module.self_attn)
    normed = normalize(cast("nn.Module", layer.module.input_layernorm), hidden)
    shape = (len(hidden), -1, cast("int", attention.head_dim))
    if layer.queries is None:
        linears = cast("tuple[nn.Module, ...]", (attention.q_proj, attention.k_proj, attention.v_proj))
        outputs: Sequence[Tensor] = [multiply(linear, normed) for linear in linears]
    else:
        outputs = layer.queries.multiply(normed)
    query, key, value = (output.view(shape) for output in outputs)
    query_norm = cast("nn.Module | None", getattr(attention, "q_norm", None))
    if query_norm is not None:
        query, key = normalize(query_norm, query), normalize(cast("nn.Module", attention.k_norm), key)
    if cosine is not None and sine is not None:
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
    return query, key, value


def finish(layer: LeanLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    """Compute the output of a layer, [T, hidden_size], from its input and [T, query_heads, head_dim] of attention."""
    module = layer.module
    output, mlp = cast("tuple[nn.Module, nn.Module]", (cast("nn.Module", module.self_attn).o_proj, module.mlp))
    hidden = hidden + multiply(output, attended.flatten(1))
    normed = normalize(cast("nn.Module", module.post_attention_layernorm), hidden)
    if not hasattr(mlp, "gate_proj"):  # a mixture of experts
        return hidden + cast("Tensor", mlp(normed.unsqueeze(0))).squeeze(0)
    gate, up, down, act = cast("tuple[nn.Module, ...]", (mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn))
    if layer.gates is None:
        opened, risen = multiply(gate, normed), multiply(up, normed)
    else:
        opened, risen = layer.gates.multiply(normed)
    # In place, so that a joined product takes no more memory than separate ones, of which the first is freed by now.
    return hidden + multiply(down, cast("Tensor", act(opened)).mul_(risen))


def multiply(linear: nn.Module, values: Tensor) -> Tensor:
    """Apply a linear module to [T, inputs], with its adapter; any other module in its place is called as it is."""
    if isinstance(linear, LoraLinear):
        return linear.adapted(values, linear_for_few(values, linear.numbers(values.dtype), linear.bias))
    if type(linear) is not nn.Linear:
        return cast("Tensor", linear(values))
    return linear_for_few(values, linear.weight, linear.bias)


def normalize(norm: nn.Module, values: Tensor) -> Tensor:
    """Apply a root-mean-square norm: in float32 by one call, else by the module, which rounds between its steps."""
    weight = cast("Tensor", norm.weight)
    if values.dtype == weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(values, weight.shape, weight, cast("float", norm.variance_epsilon))
    return cast("Tensor", norm(values))


def _of_two_rows(function: Callable[..., Result]) -> Callable[..., Result]:
    """Call a function with at least two rows: for one, `torch.compile` would make other kernels, in tens of seconds."""

    def call(layer: LeanLayer, *rows: Tensor) -> Result:
        if len(rows[0]) != 1:
            return function(layer, *rows)
        found: object = function(layer, *(torch.cat([one, one]) for one in rows))
        several = [found] if isinstance(found, Tensor) else cast("tuple[Tensor, ...]", found)
        first = [one[:1] for one in several]
        return cast("Result", first[0] if isinstance(found, Tensor) else tuple(first))

    return call


def _compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function for any number of tokens; if that fails, warn, and use the function itself."""
    best = compiled(function)

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal best
        try:
            return best(*args, **kwargs)
        except Exception as error:
            # Compilers and drivers fail in many ways. If they are not the reason, the function itself fails, too.
            if best is function or is_out_of_memory(error):
                raise
            result = function(*args, **kwargs)
            warnings.warn(f"decoding is slower, since torch.compile failed: {error}", RuntimeWarning, stacklevel=2)
            best = function
            return result

    return call
