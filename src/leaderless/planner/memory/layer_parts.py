"""Parts of the layers of a model: their linear layers by name, other weights, and states. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from leaderless.planner.memory.layers import Linear

DELTA_CHUNK = 64
"""Tokens that gated delta rules read at a time."""


@dataclass(frozen=True)
class Described:
    """The description of a model, in which each setting has one name."""

    settings: Mapping[str, object]

    def has(self, name: str) -> bool:
        """Whether a setting is there, and is not null."""
        return self.settings.get(name) is not None

    def layer(self, number: int) -> Described:
        """The same with the settings that a layer has of its own."""
        own = cast("Mapping[int, Mapping[str, object]]", self.settings.get("per_layer_config") or {}).get(number)
        return Described({**self.settings, **own}) if own else self

    def count(self, name: str, default: int | None = None) -> int:
        """A setting that is an integer.

        Raises:
            KeyError: It is not there, and has no default.
        """
        value = self.settings.get(name)
        value = default if value is None else value
        if value is None:
            raise KeyError(name)
        return int(cast("int", value))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A setting that is true or false."""
        value = self.settings.get(name)
        return default if value is None else bool(value)

    def names(self, name: str) -> list[str]:
        """A setting that is a list of names; empty if it is not there."""
        return [str(one) for one in cast("list[object]", self.settings.get(name) or [])]

    def numbers(self, name: str) -> list[int]:
        """A setting that is a list of integers; empty if it is not there."""
        return [*map(int, cast("list[int]", self.settings.get(name) or []))]


class LayerPart(NamedTuple):
    """A part of a layer, or several of them.

    Attributes:
        linears: Linear layers, by their names in the layer.
        num_others: Weights in no linear layer, and biases.
        num_expert_parameters: Weights of experts, among the others.
        inner_size: Width of the feed-forward part that a token goes through, over all of its experts.
        num_kept: Numbers of each token that are kept for the backward pass, in the type of the model, besides queries,
            keys, values and results of attention and inner features.
    """

    linears: tuple[Linear, ...] = ()
    num_others: int = 0
    num_expert_parameters: int = 0
    inner_size: int = 0
    num_kept: int = 0

    @property
    def num_parameters(self) -> int:
        """All weights."""
        return self.num_others + sum(inputs * outputs for _, inputs, outputs in self.linears)

    def joined(self, other: LayerPart) -> LayerPart:
        """Both parts together."""
        return LayerPart(
            (*self.linears, *other.linears),
            self.num_others + other.num_others,
            self.num_expert_parameters + other.num_expert_parameters,
            self.inner_size + other.inner_size,
            self.num_kept + other.num_kept,
        )


class RecurrenceSize(NamedTuple):
    """Sizes of a layer that reads by recurrence.

    Attributes:
        num_convolved: Inputs of convolutions that the state of a sequence holds, in the type of the model.
        num_states: Numbers in the state of its recurrence, in float32.
        num_kept: Numbers of each token, in float32, that are kept for the backward pass, as measured with the
            functions of `transformers` in plain torch; fused kernels keep fewer.
        num_operations: Operations for each token, besides two per weight.
    """

    num_convolved: int = 0
    num_states: int = 0
    num_kept: int = 0
    num_operations: int = 0

    def state_bytes(self, width: int) -> int:
        """Bytes of the state of a sequence, in a model whose numbers have `width` bytes."""
        return self.num_convolved * width + 4 * self.num_states


NO_RECURRENCE = RecurrenceSize()
"""Sizes where nothing reads by recurrence."""


class IndexerSize(NamedTuple):
    """Sizes of what chooses the keys to which a token attends (DeepSeek-V3.2).

    Attributes:
        num_heads: Heads that score keys.
        head_dim: Width of their one key for each token, and of their queries.
        num_chosen: Keys that are chosen for a token.
    """

    num_heads: int
    head_dim: int
    num_chosen: int


class Heads(NamedTuple):
    """Heads of attention. Engines that keep keys and values compressed have `num_latents` for a token of a layer.

    Values that are narrower than keys are padded to their width before tokens attend, and kept so.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_latents: int = 0

    @property
    def query_size(self) -> int:
        """Numbers in the queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """Numbers in the keys and values of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    def part(self, tp: int) -> Heads:
        """Share of a rank that divides them with others."""
        return self._replace(num_heads=-(-self.num_heads // tp), num_kv_heads=-(-self.num_kv_heads // tp))


def grouped_heads(described: Described) -> Heads:
    """Heads of queries, in groups that share keys and values."""
    heads = described.count("num_attention_heads")
    head_dim = described.count("head_dim", described.count("hidden_size") // heads)
    return Heads(heads, described.count("num_key_value_heads", heads), head_dim)


def latent_heads(described: Described) -> Heads:
    """Heads whose keys and values are made from latents that they share (DeepSeek-V2, arXiv 2405.04434)."""
    heads, rotated = described.count("num_attention_heads"), described.count("qk_rope_head_dim")
    return Heads(heads, heads, described.count("qk_nope_head_dim") + rotated, described.count("kv_lora_rank") + rotated)


def grouped_attention(described: Described, name: str, out: str, *, has_bias: bool, has_gate: bool) -> LayerPart:
    """Projections of attention; a gate of its results is made with the queries."""
    hidden, heads = described.count("hidden_size"), grouped_heads(described)
    query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    made = query * (2 if has_gate else 1)
    linears = (
        Linear(f"{name}.q_proj", hidden, made),
        Linear(f"{name}.k_proj", hidden, key),
        Linear(f"{name}.v_proj", hidden, key),
        Linear(f"{name}.{out}", query, hidden),
    )
    # A gate is kept before and after its sigmoid, and so is what it has multiplied.
    return LayerPart(linears, has_bias * (made + 2 * key + hidden), num_kept=3 * query * has_gate)


def latent_attention(described: Described, name: str) -> LayerPart:
    """Projections to latents, and from these to heads."""
    hidden, heads, has_bias = described.count("hidden_size"), latent_heads(described), described.flag("attention_bias")
    query, rank = heads.num_heads * heads.head_dim, described.count("kv_lora_rank")
    values = heads.num_heads * described.count("v_head_dim")
    expanded = heads.num_heads * described.count("qk_nope_head_dim") + values
    linears = [
        Linear(f"{name}.kv_a_proj_with_mqa", hidden, heads.num_latents),
        Linear(f"{name}.kv_b_proj", rank, expanded),
        Linear(f"{name}.o_proj", values, hidden),
    ]
    others, kept = rank + has_bias * (heads.num_latents + hidden), heads.num_latents + 2 * rank + expanded
    if described.has("q_lora_rank"):
        latents = described.count("q_lora_rank")
        linears += [Linear(f"{name}.q_a_proj", hidden, latents), Linear(f"{name}.q_b_proj", latents, query)]
        others, kept = others + latents + has_bias * latents, kept + 3 * latents
    else:
        linears.append(Linear(f"{name}.q_proj", hidden, query))
    return LayerPart((*linears,), others, num_kept=kept)


def indexer_size(described: Described) -> IndexerSize:
    """Sizes of the heads that choose keys."""
    return IndexerSize(*(described.count(f"index_{one}") for one in ("n_heads", "head_dim", "topk")))


def indexer(described: Described, name: str) -> LayerPart:
    """Projections of the heads that choose keys, and the norm of their keys; no gradient goes through them."""
    hidden, (heads, width, _) = described.count("hidden_size"), indexer_size(described)
    linears = (
        Linear(f"{name}.indexer.wq_b", described.count("q_lora_rank"), heads * width),
        Linear(f"{name}.indexer.wk", hidden, width),
        Linear(f"{name}.indexer.weights_proj", hidden, heads),
    )
    return LayerPart(linears, 2 * width)


def delta_net(described: Described, name: str, *, is_joined: bool) -> tuple[LayerPart, RecurrenceSize]:
    """A gated delta rule (Yang et al., arXiv 2412.06464), whose projections are joined in two or are four."""
    hidden = described.count("hidden_size")
    heads, key_dim, value_dim = (
        described.count(f"linear_{one}") for one in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    keys, values = described.count("linear_num_key_heads") * key_dim, heads * value_dim
    made = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
    if not is_joined:
        made = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    linears = tuple(Linear(f"{name}.{one}", hidden, width) for one, width in made.items())
    channels, kernel = 2 * keys + values, described.count("linear_conv_kernel_dim")
    linears = (*linears, Linear(f"{name}.out_proj", values, hidden))
    kept = 3 * channels + 2 * values + 7 * heads * key_dim
    part = LayerPart(linears, channels * kernel + 2 * heads + value_dim, num_kept=kept)
    in_float32 = heads * (4 * key_dim + 6 * value_dim + 5 * DELTA_CHUNK + key_dim * value_dim // DELTA_CHUNK)
    return part, _delta_rule(channels * kernel, in_float32, (heads, key_dim, value_dim))


def kimi_delta_attention(described: Described, name: str) -> tuple[LayerPart, RecurrenceSize]:
    """A delta rule with a decay for each channel (Kimi Linear, arXiv 2510.26692)."""
    hidden, heads, width = (described.count(one) for one in ("hidden_size", "linear_num_heads", "linear_head_dim"))
    whole, kernel = heads * width, described.count("linear_conv_kernel_dim")
    linears = (
        *(Linear(f"{name}.{one}_proj", hidden, whole) for one in "qkv"),
        Linear(f"{name}.forget_gate.f_a_proj", hidden, width),
        Linear(f"{name}.forget_gate.f_b_proj", width, whole),
        Linear(f"{name}.b_proj", hidden, heads),
        Linear(f"{name}.g_a_proj", hidden, width),
        Linear(f"{name}.g_b_proj", width, whole),
        Linear(f"{name}.o_proj", whole, hidden),
    )
    part = LayerPart(linears, 3 * whole * kernel + whole + heads + width, num_kept=7 * whole)
    # Decays between the tokens of a chunk are kept for each channel, and rows of the system that is solved for them.
    in_float32 = heads * (width * (3 * DELTA_CHUNK + 22) + 1500 + width * width // DELTA_CHUNK)
    return part, _delta_rule(3 * whole * kernel, in_float32, (heads, width, width))


def _delta_rule(num_convolved: int, num_kept: int, sizes: tuple[int, int, int]) -> RecurrenceSize:
    """States of a delta rule that reads chunks of tokens, from its heads and the widths of their keys and values.

    A token takes products with the state in three places: what it predicts, what it answers, and its update; and with
    the other tokens of its chunk.
    """
    heads, key_dim, value_dim = sizes
    state = key_dim * value_dim
    operations = heads * (6 * state + 2 * DELTA_CHUNK * (3 * key_dim + 2 * value_dim))
    return RecurrenceSize(num_convolved, heads * state, num_kept, operations)


class StateSpace(NamedTuple):
    """Sizes of a state space (Mamba-2, arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_states: int
    num_groups: int
    kernel: int
    chunk: int


def state_space(
    described: Described, name: str, sizes: StateSpace, *, biases: tuple[bool, bool, bool], has_norm: bool
) -> tuple[LayerPart, RecurrenceSize]:
    """A state space; its convolution, its first and its last projection have biases or not."""
    hidden, (heads, head_dim, states, groups, kernel, chunk) = described.count("hidden_size"), sizes
    inner = heads * head_dim
    channels = inner + 2 * groups * states
    made = inner + channels + heads
    in_convolution, in_first, in_last = biases
    others = channels * (kernel + in_convolution) + 3 * heads + inner * has_norm + made * in_first + hidden * in_last
    linears = Linear(f"{name}.in_proj", hidden, made), Linear(f"{name}.out_proj", inner, hidden)
    # With the other tokens of its chunk, and with the state before and behind it.
    operations = heads * (4 * head_dim * states + 2 * chunk * (states + head_dim))
    part = LayerPart(linears, others, num_kept=2 * inner + 8 * groups * states)
    in_float32 = heads * (3 * chunk + 4 * states + 10 * head_dim + 3 * head_dim * states // chunk + 30)
    return part, RecurrenceSize(channels * kernel, inner * states, in_float32, operations)


def short_convolution(described: Described, name: str) -> tuple[LayerPart, RecurrenceSize]:
    """A gated convolution over few tokens (LFM2, arXiv 2511.23404)."""
    hidden, kernel = described.count("hidden_size"), described.count("conv_L_cache")
    linears = Linear(f"{name}.in_proj", hidden, 3 * hidden), Linear(f"{name}.out_proj", hidden, hidden)
    others = hidden * kernel + described.flag("conv_bias") * 5 * hidden
    return LayerPart(linears, others, num_kept=6 * hidden), RecurrenceSize(hidden * kernel)
