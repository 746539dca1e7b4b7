"""Messages between a rank and its engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from leaderless.distributed.weights.packed import torch_dtype


@dataclass(frozen=True)
class Settings:
    """Settings of an engine."""

    model: str  # folder or hub name; weights are read from it only if adapters come, and else only shapes
    revision: str | None
    trust_remote_code: bool
    dtype: str  # of weights and activations
    max_tokens: int  # of a prompt with its response
    max_sequences: int
    memory_fraction: float
    kv_cache_bytes: int | None  # None for everything that the fraction leaves
    enable_graphs: bool
    tensor_parallel_size: int = 1  # ranks that make one engine together
    meeting: str | None = None  # file in which processes of an engine find each other; None for one that is alone
    rank: int = 0  # of this process among those that meet
    device_index: int = 0  # of this process's device, among those that it sees
    sees_images: bool = False  # whether prompts may have images
    # What `peft` has to know of each set of adapters, by its name; none if whole weights come.
    adapters: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    matrices: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of all matrices of each set
    expert_layers: Sequence[int] = ()  # layers whose choices of experts are recorded; none if they are not
    experts_per_token: int = 0  # that each of these layers chooses

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch_dtype(self.dtype)


@dataclass(frozen=True)
class Ask:
    """A request for one response, which `id` identifies; sampling settings are as in `SamplingConfig`.

    A prompt with images has one token for each; `images` are their files in base64, and with all tokens that these
    become it has `num_tokens`. Tokens that are `impossible` are never drawn. `adapter` names the
    adapters with which it is computed. Up to `tokens_at_once` tokens of it may be reported together.
    """

    id: int
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    end_tokens: Sequence[int]
    images: Sequence[str] = ()
    num_tokens: int = 0
    impossible: Sequence[int] = ()
    adapter: str = ""
    tokens_at_once: int = 1


class Gain(NamedTuple):
    """New tokens of a response, with their log-probabilities under the distribution they were drawn from.

    `finish_reason` is `stop` or `length`, or None while the response continues; `policy_version` is the version of the
    weights that sampled the tokens. `cached_tokens` counts tokens of the prompt whose keys and values the engine still
    had; it may be repeated with each gain. `experts` are the choices for tokens that have been read, in base64, one
    entry for each: first for the prompt, then for the response but its last one.
    """

    id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    policy_version: int
    cached_tokens: int = 0
    experts: Sequence[str] = ()


def joined(gains: Iterable[Gain]) -> list[Gain]:
    """Join the gains of each response, which come in order, and were all sampled with the same weights."""
    found: dict[int, list[Gain]] = {}
    for gain in gains:
        found.setdefault(gain.id, []).append(gain)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in found.values()]


def _join(parts: Sequence[Gain]) -> Gain:
    ids, tokens, log_probs, reasons, versions, cached, experts = zip(*parts, strict=True)
    assert versions[0] == versions[-1], "other weights abort what is in progress"
    return Gain(
        ids[0], [*chain(*tokens)], [*chain(*log_probs)], reasons[-1], versions[0], cached[0], [*chain(*experts)]
    )


def to_columns(gains: Sequence[Gain]) -> dict[str, list[Any]]:
    """Write gains as lists that JSON can hold, one for each field; the last one, of experts, only if there are any."""
    columns = {name: [gain[place] for gain in gains] for place, name in enumerate(Gain._fields)}
    if not any(columns["experts"]):
        del columns["experts"]
    return columns


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Gain]:
    """Read what `to_columns` has written."""
    return [*map(Gain, *columns.values())]
