"""Attention over pages as Triton kernels. Importing this needs Triton, which builds of torch for CUDA bring along."""

from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

from leaderless.rollout.paged_plan import ITEM_NUMBERS, PagedPlan, WorkItems

LEAST_QUERIES = 16
"""Least rows of a product on tensor cores."""
LEAST_WIDTH = 16
"""Least numbers of a key that Triton multiplies; the keys of tiny models are filled up."""
KEY_BYTES = 1 << 14
"""Most bytes of the keys, or of the values, that a program reads at a time; half of it in float32."""
LOG2E = 1.4426950408889634
COPIED = 1024
"""Numbers that a program copies into a page."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, which takes bfloat16 in products for integers."""


@triton.jit  # type: ignore[untyped-decorator]
def write_pages(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the keys and values of one row, `width` numbers each, at its place."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * block + tl.arange(0, block)
    is_real = number < width
    place = tl.load(places + row)
    tl.store(keys + place * width + number, tl.load(key + row * width + number, mask=is_real), mask=is_real)
    tl.store(values + place * width + number, tl.load(value + row * width + number, mask=is_real), mask=is_real)


@triton.jit  # type: ignore[untyped-decorator]
def attend_to_items(  # noqa: PLR0913, PLR0917
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    outputs: tl.tensor,
    normalizers: tl.tensor,
    scale: tl.tensor,
    kv_heads: tl.constexpr,
    repeat: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    page_size: tl.constexpr,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    numbers: tl.constexpr,
    is_widened: tl.constexpr,
) -> None:
    """Attend with the rows of one item and the query heads of one key head to the tokens of the item.

    Results are float32 and divided by their own sums; normalizers are logarithms of these to the base of 2.
    """
    item = items + tl.program_id(0) * numbers
    kv_head = tl.program_id(1)
    table, num_tokens = tl.load(item), tl.load(item + 1)
    first_row, num_rows, first_result = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    if num_tokens == 0:
        return
    dim = tl.arange(0, block)
    is_dim = dim < width
    # Query heads that share a key head are computed as several queries of that head.
    one = tl.arange(0, num_queries)
    member, head = one // repeat, kv_head * repeat + one % repeat
    is_query = member < num_rows
    row = tl.load(rows + first_row + member, mask=is_query, other=0).to(tl.int64)
    is_read = is_query[:, None] & is_dim[None, :]
    place = (row * (kv_heads * repeat) + head) * width
    asked = tl.load(query + place[:, None] + dim[None, :], mask=is_read, other=0.0)
    if is_widened:
        asked = asked.to(tl.float32)
    peak = tl.full([num_queries], float("-inf"), tl.float32)
    total = tl.zeros([num_queries], tl.float32)
    result = tl.zeros([num_queries, block], tl.float32)
    for begin in range(0, num_tokens, num_keys):
        token = begin + tl.arange(0, num_keys)
        is_key = token < num_tokens
        page = tl.load(pages + table + token // page_size, mask=is_key, other=0).to(tl.int64)
        start = ((page * page_size + token % page_size) * kv_heads + kv_head) * width
        # What lies behind the last token is not read: 0 times NaN would be NaN.
        key = tl.load(keys + start[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        value = tl.load(values + start[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        if is_widened:
            key = key.to(tl.float32)
        scores = tl.dot(asked, key, input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        kept = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(value.dtype)
        if is_widened:
            weights, value = weights.to(tl.float32), value.to(tl.float32)
        result = result * kept[:, None] + tl.dot(weights, value, input_precision="ieee")
        peak = new_peak
    written = (first_result + member).to(tl.int64) * (kv_heads * repeat) + head
    tl.store(outputs + written[:, None] * width + dim[None, :], result / total[:, None], mask=is_read)
    tl.store(normalizers + written, peak + tl.log2(total), mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def merge_items(  # noqa: PLR0913, PLR0917
    outputs: tl.tensor,
    normalizers: tl.tensor,
    runs: tl.tensor,
    merged: tl.tensor,
    kv_heads: tl.constexpr,
    repeat: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    heads: tl.constexpr,
) -> None:
    """Merge the results of one row, for the query heads of one key head; a row without any gets zeros."""
    row = tl.program_id(0).to(tl.int64)
    one, dim = tl.arange(0, heads), tl.arange(0, block)
    head = tl.program_id(1) * repeat + one
    is_head = one < repeat
    is_read = is_head[:, None] & (dim < width)[None, :]
    peak = tl.full([heads], float("-inf"), tl.float32)
    total = tl.zeros([heads], tl.float32)
    result = tl.zeros([heads, block], tl.float32)
    for kind in tl.static_range(2):  # own tokens, and those of a shared prompt
        run = runs + (row * 2 + kind) * 3
        first, count, distance = tl.load(run), tl.load(run + 1), tl.load(run + 2)
        for number in range(count):
            place = (first + number * distance).to(tl.int64) * (kv_heads * repeat) + head
            normalizer = tl.load(normalizers + place, mask=is_head, other=0.0)
            part = tl.load(outputs + place[:, None] * width + dim[None, :], mask=is_read, other=0.0)
            new_peak = tl.maximum(peak, normalizer)
            kept, share = tl.exp2(peak - new_peak), tl.exp2(normalizer - new_peak)
            total = total * kept + share
            result = result * kept[:, None] + part * share[:, None]
            peak = new_peak
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    place = (row * (kv_heads * repeat) + head) * width
    tl.store(merged + place[:, None] + dim[None, :], result.to(merged.dtype.element_ty), mask=is_read)


def options_of(queries: int, block: int, width: int) -> dict[str, int]:
    """Sizes of `attend_to_items` for some queries, with `block` numbers of `width` bytes in each key.

    Products in float32 are computed without tensor cores: with larger sizes their numbers would not fit into registers.
    """
    num_queries, is_half = max(LEAST_QUERIES, triton.next_power_of_2(queries)), width == 2
    key_bytes = KEY_BYTES if is_half else KEY_BYTES // 2
    return {
        "num_queries": num_queries,
        "num_keys": max(16, min(64, key_bytes // (block * width))),
        "num_warps": max(4, num_queries * width // 32),
        "num_stages": 3 if block <= 128 and is_half else 2,
    }


def attend_with_kernels(
    query: Tensor, key: Tensor, value: Tensor, cached: tuple[Tensor, Tensor], plan: PagedPlan, scale: float
) -> Tensor:
    """See `attend_with_torch`. Four kernels, and no copy of what is in the pages."""
    keys, values = cached
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    num_rows, num_heads, width = query.shape
    kv_heads = keys.shape[1]
    repeat, block = num_heads // kv_heads, max(LEAST_WIDTH, triton.next_power_of_2(width))
    sizes = {"kv_heads": kv_heads, "repeat": repeat, "width": width, "block": block}
    whole, copied = kv_heads * width, min(COPIED, triton.next_power_of_2(kv_heads * width))
    write_pages[num_rows, triton.cdiv(whole, copied)](key, value, keys, values, plan.places, whole, copied)
    outputs, normalizers = plan.room(num_heads, width)

    def attend(work: WorkItems) -> None:
        attend_to_items[len(work.items), kv_heads](
            *(query, keys, values, work.items, work.rows, plan.pages, outputs, normalizers, scale * LOG2E),
            **sizes,
            **options_of(work.most_rows * repeat, block, keys.dtype.itemsize),
            page_size=plan.page_size,
            numbers=ITEM_NUMBERS,
            is_widened=IS_INTERPRETED,
        )

    attend(plan.own)
    attend(plan.shared)
    merged = query.new_empty(query.shape)
    heads = triton.next_power_of_2(repeat)
    merge_items[num_rows, kv_heads](outputs, normalizers, plan.runs, merged, **sizes, heads=heads)
    return merged
