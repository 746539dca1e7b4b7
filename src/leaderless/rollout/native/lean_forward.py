"""A shorter way through decoders of known families.

With few rows or a small model, most of a decoding step is Python and small kernels. `transformers` spends them on
masks, caches, transposes and wrappers that are not needed here. The same weights go through the same steps: norm,
queries, keys and values, rotary positions, attention, and the layer's own feed-forward module, experts included.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from leaderless.distributed.errors import is_out_of_memory
from leaderless.models.attention.packed import Attention
from leaderless.models.causal_lm import CausalLM
from leaderless.models.compiled_layers import compiled
from leaderless.models.lora.linear import LoraLinear
from leaderless.models.scoring import linear_for_few
from leaderless.rollout.native.joined_weights import Joined, JoinedWeights, LeanLayer
from leaderless.rollout.native.paged_attention import PagedAttention
from leaderless.rollout.native.rotary import Rotation, rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from leaderless.models.vision.mrope import ImagePositions

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
    config = model.model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return cast("Forward", model)
    text = cast("PreTrainedModel", model.text_model)
    layers = text.layers
    head_dim = layers[0].self_attn.head_dim
    turned = 2 * len(text.rotary_emb.inv_freq)
    has_window = any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in layers)
    return cast("Forward", model) if has_window or turned != head_dim else LeanForward(model, enable_compile)


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
            scale = cast("float", cast("nn.Module", layer.module.self_attn).scaling)
            if isinstance(attention, PagedAttention):  # it rotates while it writes keys into pages
                attended = attention.attend(number, *self._project(layer, hidden), scale, rotation)
            else:
                attended = attention.attend(number, *self._project(layer, hidden, *rotation), scale)
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
    return hidden + feed_forward(mlp, normed, layer.gates)


def feed_forward(mlp: nn.Module, hidden: Tensor, joined: Joined | None = None) -> Tensor:
    """Apply the feed-forward part of a layer to [T, hidden_size]; a mixture of experts is called as a module."""
    if not hasattr(mlp, "gate_proj"):
        return cast("Tensor", mlp(hidden.unsqueeze(0))).squeeze(0)
    gate, up, down, act = cast("tuple[nn.Module, ...]", (mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn))
    opened, risen = (multiply(gate, hidden), multiply(up, hidden)) if joined is None else joined.multiply(hidden)
    # In place, so that a joined product takes no more memory than separate ones, of which the first is freed by now.
    return multiply(down, cast("Tensor", act(opened)).mul_(risen))


def multiply(linear: nn.Module, values: Tensor) -> Tensor:
    """Apply a linear module to [T, inputs], with its adapter; any other module in its place is called as it is."""
    if isinstance(linear, LoraLinear):
        return linear.adapted(values, linear_for_few(values, linear.weight, linear.bias))
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
