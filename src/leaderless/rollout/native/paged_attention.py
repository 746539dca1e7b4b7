"""Attention of decoding passes over pages, by Triton kernels or by torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.models.attention.form import AttentionForm
from leaderless.rollout.native.lean_forward import RotatingAttention, Rotation, rotate
from leaderless.rollout.native.paged_plan import PagedPlan, WorkItems
from leaderless.rollout.native.pages import PagePool


class PagedAttend(Protocol):
    """A function like `attend_with_torch`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cached: tuple[Tensor, Tensor],
        plan: PagedPlan,
        scale: float,
        rotation: Rotation | None = None,
        /,
    ) -> Tensor:
        """Attend with [n, query_heads, head_dim]."""


@dataclass
class PagedAttention(RotatingAttention):
    """Attention with one new token for each row of a plan."""

    pages: PagePool
    plan: PagedPlan
    function: PagedAttend

    @override
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        form: AttentionForm,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if not form.is_plain:
            raise RuntimeError(f"layer {layer} has a window, chunks, a bound or sinks, which pages do not support")
        return self.function(query, key, value, self.pages.room(layer, key, value), self.plan, form.scale, rotation)


def attend_with_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: tuple[Tensor, Tensor],
    plan: PagedPlan,
    scale: float,
    rotation: Rotation | None = None,
) -> Tensor:
    """Write keys and values of new tokens into pages, and attend to all tokens of each row, in at least float32.

    It copies what it reads. Its sums have the terms of the kernels' sums, in another order.

    Args:
        query: [n, query_heads, head_dim], one new token of each row.
        key: [n, kv_heads, head_dim].
        value: [n, kv_heads, head_dim].
        cached: Keys and values of all pages, [tokens, kv_heads, head_dim] each.
        plan: Work of the pass.
        scale: Factor of the dot products.
        rotation: Rotation of queries and keys that are not rotated yet.

    Returns:
        [n, query_heads, head_dim]; zeros for a row without tokens.
    """
    if rotation is not None:
        query, key = rotate(query, *rotation), rotate(key, *rotation)
    for tensor, new in zip(cached, (key, value), strict=True):
        tensor.index_copy_(0, plan.places, new)
    dtype = torch.promote_types(query.dtype, torch.float32)
    outputs, normalizers = (room.to(dtype) for room in plan.room(*query.shape[1:]))
    for work in (plan.own, plan.shared):
        if work.longest:
            _attend_to_items(query.to(dtype), cached, plan, work, (outputs, normalizers), scale)
    first, count, distance = plan.runs.long().unbind(2)
    number = torch.arange(max(1, int(count.max())), device=query.device)
    places = first[:, :, None] + number * distance[:, :, None]  # of each row, kind and number of an item
    is_real = (number < count[:, :, None]).flatten(1)
    places = places.flatten(1).where(is_real, 0)
    shares = normalizers[places].masked_fill(~is_real[:, :, None], -torch.inf).softmax(1).nan_to_num(0)
    parts = outputs[places].where(is_real[:, :, None, None], 0)
    return (parts * shares.unsqueeze(3)).sum(1).to(query.dtype)


def _attend_to_items(
    query: Tensor,
    cached: tuple[Tensor, Tensor],
    plan: PagedPlan,
    work: WorkItems,
    results: tuple[Tensor, Tensor],
    scale: float,
) -> None:
    """Write the results of items, and their normalizers as natural logarithms."""
    table, tokens, first_row, num_rows, first_result = work.items[work.items[:, 1] > 0].long().unbind(1)
    token = torch.arange(work.longest, device=query.device)
    is_key = token < tokens[:, None]
    entry = table[:, None] + token // plan.page_size
    slot = plan.pages[entry.where(is_key, 0)].long() * plan.page_size + token % plan.page_size
    keys, values = (
        tensor[slot.where(is_key, 0)].to(query.dtype).where(is_key[:, :, None, None], 0) for tensor in cached
    )
    member = torch.arange(work.most_rows, device=query.device)
    is_row = member < num_rows[:, None]
    rows = work.rows[(first_row[:, None] + member).where(is_row, 0)].long()
    taken = query[rows]
    asked = taken.view(*taken.shape[:2], keys.shape[2], -1, taken.shape[3])
    scores = torch.einsum("irhqd,ithd->irhqt", asked, keys) * scale
    scores = scores.masked_fill(~is_key[:, None, None, None, :], -torch.inf)
    normalizers = scores.logsumexp(-1)
    found = torch.einsum("irhqt,ithd->irhqd", (scores - normalizers.unsqueeze(-1)).exp(), values)
    places = (first_result[:, None] + member)[is_row]
    results[0][places], results[1][places] = found.flatten(2, 3)[is_row], normalizers.flatten(2, 3)[is_row]
